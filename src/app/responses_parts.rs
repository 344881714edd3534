//! What the Responses API needs besides the store: webhooks, and the keys of state tokens.

use std::io;
use std::sync::Arc;

use tracing::info;

use crate::config::Config;
use crate::http::drain::Tasks;
use crate::http::tls::Clients;
use crate::observe::metrics::Registry;
use crate::responses::Mode;
use crate::state_token::KeyRing;
use crate::store::OpenStore;
use crate::webhooks::Webhooks;

/// Reports the end of background responses from now on.
pub(super) fn webhooks(
    config: &Config,
    store: &OpenStore,
    clients: &Arc<Clients>,
    tasks: &Tasks,
    metrics: &Registry,
) -> Arc<Webhooks> {
    let (outbox, clients) = (store.outbox.clone(), clients.clone());
    let webhooks = Webhooks::new(&config.webhooks, outbox, clients, tasks.clone(), metrics);
    let supervisor = tasks.supervisor();
    let delivering = supervisor.restarts("webhooks", webhooks.clone(), Webhooks::run);
    tasks.spawn_until_stopped(delivering);
    webhooks
}

/// What signs the state that clients keep.
pub(super) fn key_ring(config: &Config, metrics: &Registry) -> io::Result<KeyRing> {
    let settings = config.responses.state_token.clone();
    let mut own = [0; 32];
    if settings.keys.is_empty() {
        getrandom::fill(&mut own).map_err(io::Error::other)?;
        if config.responses.mode == Mode::Stateful {
            info!(
                "signing state tokens with a key of this process alone; clients cannot use them after a restart \
                 (set responses.state_token.keys to keep them valid)"
            );
        }
    }
    // The configuration was checked.
    let key_ring = KeyRing::new(settings, own, metrics)
        .map_err(|problems| io::Error::other(format!("{problems:?}")))?;
    key_ring.set_max_body(config.api.requests.max_body);
    Ok(key_ring)
}
