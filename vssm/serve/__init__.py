"""A server that batches, streams and resumes; its page; and a client.

| module | what |
| --- | --- |
| `settings` | every limit |
| `errors` | the one form of every refusal |
| `models` | what is served under a name: a model with its data, or a forecaster |
| `jobs` | a request as a series of pieces of bounded size |
| `scheduler` | which requests are admitted, and whose piece is next |
| `worker` | the thread that computes batches of pieces |
| `resume` | states that wait in the server under handles |
| `schema` | the fields of requests and answers; sequences to tensors |
| `forecast` | the same for forecasts |
| `guard` | what every request passes first: token, size, time, log and metrics |
| `service` | requests to jobs, results to answers |
| `app` | the routes; `page.html` and `docs.html` are the pages at / and /docs |
| `run` | `vssm serve`, on uvicorn |
| `client` | `Client("http://...")` |

Nothing here is imported by `import vssm`. It needs the extra `serve`.
"""
