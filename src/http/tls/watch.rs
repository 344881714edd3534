//! Looks at the files of all TLS settings now and then.

use std::sync::Arc;
use std::time::Duration;

use super::client::Clients;
use super::server::Server;
use crate::observe;

/// A volume of Kubernetes follows its Secret within a minute, so this adds nothing to speak of.
const INTERVAL: Duration = Duration::from_secs(2);

/// Uses the files of listeners and of connections to workers as they change, for ever.
pub async fn watch(servers: Vec<Arc<Server>>, clients: Arc<Clients>) {
    loop {
        // A few kilobytes when something has changed or cannot be used: a blocking read is cheaper than another thread.
        let now = observe::wall_clock();
        for server in &servers {
            server.look(now);
        }
        clients.look(now);
        tokio::time::sleep(INTERVAL).await;
    }
}
