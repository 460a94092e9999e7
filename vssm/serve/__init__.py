"""A server that batches, streams and resumes, the page it shows, and a client.

| module | what |
| --- | --- |
| `settings` | every limit, in one place |
| `errors` | one form for everything that is refused |
| `models` | what is served: a model, what its data are, and how its batches are padded |
| `engine` | one thread that computes, merging requests that fit together |
| `resume` | handles of states kept here, and sealed states that the client keeps |
| `body` | JSON bodies to fields and arrays, large ones in a child process |
| `schema` | what requests and answers look like; prompts to tensors |
| `guard` | what every request passes first: token, size, time, log and metrics |
| `service` | what the routes do: plan, compute, stream, keep |
| `app` | the routes |
| `page.html` | the page at / |
| `run` | `vssm serve`, on uvicorn; `cluster` the same on Ray Serve |
| `client` | `Client("http://...")` |

Nothing here is imported by `import vssm`; it needs the extra `serve`.
"""
