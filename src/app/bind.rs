//! Starts a router on the addresses that its configuration names.

use std::io;

use tokio::net::TcpListener;

use super::App;
use crate::config::Config;
use crate::http::listen_address::listen_address;

impl App {
    /// Starts a router on the addresses that its configuration names.
    pub async fn bind(config: &Config) -> io::Result<Self> {
        let listen = async |path: &str, flag: &str, listen: &str| {
            let named = |error: io::Error| {
                let hint = format!("give another address with `{path}` or `{flag}`");
                let message = format!("cannot listen at {listen}: {error}; {hint}");
                io::Error::new(error.kind(), message)
            };
            let address = listen_address(listen).map_err(io::Error::other)?;
            TcpListener::bind(address).await.map_err(named)
        };
        let api = listen("api.listen", "--listen", &config.api.listen).await?;
        let admin = listen("admin.listen", "--admin-listen", &config.admin.listen).await?;
        let picker = if config.endpoint_picker.is_on() {
            let address = &config.endpoint_picker.listen;
            Some(
                listen(
                    "endpoint_picker.listen",
                    "--endpoint-picker-listen",
                    address,
                )
                .await?,
            )
        } else {
            None
        };
        let peers = if config.peers.is_on() {
            Some(listen("peers.listen", "--peers-listen", &config.peers.listen).await?)
        } else {
            None
        };
        let app = Self::start_with_peers(config, api, admin, peers)?;
        if let Some(picker) = picker {
            app.serve_gateways(config, picker)?;
        }
        Ok(app)
    }
}
