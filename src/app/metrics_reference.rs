//! The reference of all metrics, written from the code that registers them.

use std::io;

use tokio::net::TcpListener;

use super::App;
use crate::bridge;
use crate::config::Config;
use crate::fleet::kv_transfer::Connector;
use crate::prompt::pool::{self, Pool};

const HEADER: &str = "\
# Metrics

Generated from the code by `warmroute metrics reference`; a test holds this page against it.

`GET /metrics` on the admin port gives them in the Prometheus text format. Those that begin with
`warmroute_bridge_` are the ones of `warmroute bridge`. A metric with labels appears with its first value.

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
    Ok(format!("{HEADER}{}", app.metrics.reference()))
}
