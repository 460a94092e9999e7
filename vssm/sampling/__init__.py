"""Sampling: the paper's five algorithms, each a function of this package.

| algorithm of the paper    | here                                                              |
| ------------------------- | ----------------------------------------------------------------- |
| VSSM sampling             | `sample_variational` with one chunk: everything at once           |
| VSSM chunk sampling       | `sample_variational` with `chunk=W`                               |
| RNN sampling              | `sample_autoregressive`, rnn: the prompt is read step by step     |
| SSM sampling              | `sample_autoregressive`, ssm: the prompt is read in parallel      |
| Transformer sampling      | `sample_recomputed`; with a key-value cache `sample_autoregressive` |

`sample_vrnn` completes the six models, `sample_ladder` is for a vssm with levels of latents, and
`sample_any_part` for one that conditions on any known part.
With `recondition=True` a variational model reads each chunk that it has made, instead of empty
tokens, before it makes the next: the chunk size is then a dial from fully parallel (W = T) to step
by step (W = 1). With `passes=S` it redraws all steps of a chunk at once, S - 1 times, each step
given those that the last pass made before it: a second dial between the same ends.

Every random number is a function of (seed, row, position, component), so chunk size, batch split
and resume point never change what a seed gives, but for float rounding.

A call goes from `generate` (`generation`) through its checks (`request`) to the algorithm
(`parallel`, `ladder`, `stepwise` or `anypart`), in pieces if it is too large for one pass
(`slabs`). It keeps nothing for the next call; `vssm.Engine` does.
"""
