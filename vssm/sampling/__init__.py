"""Sampling: the paper's five algorithms, each a function of this package.

| algorithm of the paper    | here                                                              |
| ------------------------- | ----------------------------------------------------------------- |
| VSSM sampling             | `sample_variational` with one chunk: everything at once           |
| VSSM chunk sampling       | `sample_variational` with `chunk=W`                               |
| RNN sampling              | `sample_autoregressive`, rnn: the prompt is read step by step     |
| SSM sampling              | `sample_autoregressive`, ssm: the prompt is read in parallel      |
| Transformer sampling      | `sample_recomputed`; with a key-value cache `sample_autoregressive` |

`sample_vrnn` is for a vrnn, `sample_ladder` for a vssm with levels of latents, and
`sample_any_part` for one that conditions on any known part.
With `recondition=True` a variational model reads each chunk that it has generated, instead of empty
tokens, before it generates the next. The chunk size then chooses anything from fully parallel
(W = T) to step by step (W = 1). With `passes=S` the model redraws all steps of a chunk at once,
S - 1 times. A step is redrawn given the steps before it in the last pass. So S also leads from
parallel (S = 1) to step by step (S = W).

Every random number is a function of (seed, row, position, component). So chunk size, batch split
and resume point never change the sample of a seed, except for float rounding.

A call goes from `generate` (`generation`) through its checks (`request`) to the algorithm
(`parallel`, `ladder`, `stepwise` or `anypart`), in pieces if it is too large for one pass
(`slabs`). It keeps nothing for the next call; `vssm.Engine` does.
"""
