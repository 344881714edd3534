//! TLS of the listeners, and of the connections to workers.

use std::io;
use std::sync::Arc;

use crate::api::endpoint_picker;
use crate::config::Config;
use crate::fleet::registry::Registry;
use crate::http::drain::Tasks;
use crate::http::tls::{self, Listener, Metrics, Server, ServerSettings};
use crate::observe::metrics;

/// TLS of each listener that has it.
#[derive(Clone, Debug)]
pub struct Listeners {
    pub(super) api: Option<Arc<Server>>,
    pub(super) admin: Option<Arc<Server>>,
    pub(super) peers: Option<Arc<Server>>,
    pub(super) endpoint_picker: Option<Arc<Server>>,
    metrics: Metrics,
}

/// What is wrong with a listener's TLS: the path of the key, and a message.
pub type Problem = (String, String);

/// TLS of all connections that the router may open. Reads the files of settings that are new.
pub(super) fn clients(config: &Config, known: &tls::Clients) -> Vec<Arc<tls::Client>> {
    let settings = config.client_tls();
    settings
        .iter()
        .map(|settings| known.get(settings))
        .collect()
}

impl Listeners {
    /// `admin_connections` is the maximum of the admin listener's connections.
    pub(super) fn new(
        config: &Config,
        admin_connections: u32,
        registry: &metrics::Registry,
    ) -> io::Result<Self> {
        let metrics = Metrics::new(registry);
        let server = |listener, settings: &Option<ServerSettings>, connections| {
            let settings = settings.as_ref();
            let server =
                settings.map(|settings| Server::new(listener, settings, connections, &metrics));
            server.transpose()
        };
        let has_peers = config.peers.is_on();
        let of_peers = config.peers.tls.clone().filter(|_| has_peers);
        let picker = &config.endpoint_picker;
        let of_picker = picker.tls.clone().filter(|_| picker.is_on());
        let peer_connections = config.peers.advanced.max_peers.saturating_mul(4);
        Ok(Self {
            api: server(
                Listener::Api,
                &config.api.tls,
                config.api.advanced.max_connections,
            )?,
            admin: server(Listener::Admin, &config.admin.tls, admin_connections)?,
            peers: server(Listener::Peers, &of_peers, peer_connections)?,
            endpoint_picker: server(
                Listener::EndpointPicker,
                &of_picker,
                endpoint_picker::MAX_CONNECTIONS,
            )?,
            metrics,
        })
    }

    /// Follows the files, of the connections to workers too.
    pub(super) fn watch(&self, fleet: &Registry, tasks: &Tasks) -> io::Result<()> {
        let clients = fleet.tls().clone();
        clients.set_metrics(self.metrics.clone());
        let servers = [&self.api, &self.admin, &self.peers, &self.endpoint_picker];
        let servers = servers.into_iter().flatten();
        let watching = tls::watch(servers.cloned().collect(), clients)?;
        tasks.spawn_until_stopped(tasks.supervisor().essential("tls_files", watching));
        Ok(())
    }

    /// Uses the settings of another configuration for new connections. A listener whose settings cannot be used keeps
    /// its own, and what is wrong is returned. Whether a listener has TLS at all does not change.
    pub fn replace(&self, config: &Config) -> Vec<Problem> {
        let listeners = [
            ("api.tls", &self.api, &config.api.tls),
            ("admin.tls", &self.admin, &config.admin.tls),
            ("peers.tls", &self.peers, &config.peers.tls),
            (
                "endpoint_picker.tls",
                &self.endpoint_picker,
                &config.endpoint_picker.tls,
            ),
        ];
        let mut problems = Vec::new();
        for (path, server, settings) in listeners {
            let (Some(server), Some(settings)) = (server, settings) else {
                continue;
            };
            let found = server.replace(settings).err().into_iter().flatten();
            problems.extend(found.map(|(key, error)| (format!("{path}.{key}"), error)));
        }
        problems
    }
}
