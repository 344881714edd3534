//! Starts the listener for gateways that ask which worker is to get a request.

use std::io;

use tokio::net::TcpListener;
use tracing::info;

use super::App;
use crate::api::endpoint_picker::EndpointPicker;
use crate::config::Config;
use crate::http::server;
use crate::observe::metrics::Registry;

impl App {
    /// Serves gateways until the drain begins.
    pub fn serve_gateways(&self, config: &Config, listener: TcpListener) -> io::Result<()> {
        let settings = &config.endpoint_picker;
        let address = listener.local_addr()?;
        let (readiness, tasks) = (self.readiness.clone(), self.tasks.clone());
        let picker = EndpointPicker::new(settings, readiness, &self.metrics);
        let api = self.api_server.clone();
        let handlers = server::Handlers {
            handler: move |request, peer| picker.clone().answer(api.load_full(), request, peer),
            on_malformed: None,
            tls: self.tls.endpoint_picker.clone(),
        };
        let serving = server::serve(
            listener,
            EndpointPicker::connections(),
            // The connection metrics are about the API's clients.
            server::Metrics::new(&Registry::default()),
            handlers,
            self.io_threads.clone(),
            tasks.clone(),
        );
        tasks.spawn(tasks.supervisor().essential("endpoint_picker", serving));
        info!(%address, "the endpoint picker listens for gateways");
        Ok(())
    }
}
