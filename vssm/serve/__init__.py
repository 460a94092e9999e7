"""The HTTP server, which batches, streams and resumes, and its page.

| module | what |
| --- | --- |
| `settings` | every limit |
| `errors` | the one form of every refusal |
| `models` | the models and forecasters that are served, by name |
| `calls` | a request as a series of calls of bounded size |
| `worker` | decides whose call is next; computes calls, in batches |
| `states` | states that wait in the server under handles |
| `schema` | the fields of requests; sequences to tensors |
| `forecast` | the same for forecasts |
| `guard` | the checks that every request passes first: token, size and time; log and metrics |
| `service` | the routes: requests to calls, results to answers |
| `app` | the app; `page.html` and `docs.html` are the pages at / and /docs |
| `run` | `vssm serve`, on uvicorn |

Nothing here is imported by `import vssm`. It needs the extra `serve`.
"""
