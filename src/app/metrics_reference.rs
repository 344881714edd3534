//! The reference of all metrics, written from the code that registers them.

use std::io;

use tokio::net::TcpListener;

use super::App;
use crate::batches;
use crate::bridge;
use crate::config::Config;
use crate::fleet::kv_transfer::Connector;
use crate::prompt::pool::{self, Pool};

const HEADER: &str = "\
# Metrics

Generated from the code by `warmroute metrics reference`; a test holds this page against it.

`GET /metrics` on the admin port gives them in the Prometheus text format. Those that begin with
`warmroute_bridge_` are the ones of `warmroute bridge`. A metric with labels appears with its first value.
The series of a model disappear once no worker has served it and no request has asked for it for an hour, unless the
configuration names it.
Those of its requests at one worker disappear when the worker leaves the fleet and, once 2,000 pairs of a model and a
worker have series, when the worker does not serve the model any more.

";

const OUTCOMES: &str = "
## How requests end

Every request that the API port answers with an error, and every one that a worker answered, is counted once for each answer in
`warmroute_requests_total`. `status` is that of a worker's answer, and `none` where no worker answered; `model` is `none` where the request ended before it was known. The dashboard
and `warmroute top` show the shares of the third column. `warmroute_request_errors_total` has the router's own errors by status and code.

| outcome | which answer | shown as |
|---|---|---|
| `complete` | a worker's whole answer, whatever its status | complete; failed with a status of 500 and above |
| `client_disconnected` | the client left before the end | client left |
| `refused` | the router's own 4xx: no known key (401), a page of another origin (403), a path or a model that does not exist or that the tenant may not use (404), a head or a body that cannot be read (400, 413, 415, 431), a limit of the tenant (429); a name that no worker is known to serve, while one may (503); a line of a batch whose tenant or model this replica's configuration does not have (503), which is tried again | refused |
| `not_queued` | 429 of the queue: it was full, or the request waited too long or would miss its target | refused |
| `worker_failed` | no worker could take the request or answered it (502, 503, 504), or a worker's answer broke off or had an error in it | failed |
| `stream_idle_timeout` | the worker's stream was silent for too long | failed |
| `request_timeout` | the request took longer than `requests.request_timeout` (504, or an error event in the stream) | failed |
| `router_failed` | the router's own 5xx: its store is away, it drains (also a stream that outlasts the drain), or it has no connections left | failed |
";

/// The page in Markdown. Starts a router on free loopback ports, so that every part registers its metrics.
pub async fn page() -> io::Result<String> {
    let mut config = Config::default();
    // Parts that are off by default.
    config.prefill_decode.connector = Some(Connector::Nixl);
    let listen = async || TcpListener::bind("127.0.0.1:0").await;
    let app = App::start(&config, listen().await?, listen().await?)?;
    app.serve_gateways(&config, listen().await?)?;
    // A router starts it for models whose tokenizer it has.
    let _pool = Pool::start(&pool::Settings::default(), &app.metrics)?;
    bridge::metrics::Metrics::new(&app.metrics);
    // Without storage a router has none.
    batches::Metrics::new(&app.metrics);
    batches::Files::register_metrics(&app.metrics);
    let reference = app.metrics.reference();
    Ok(format!("{HEADER}{reference}{OUTCOMES}"))
}
