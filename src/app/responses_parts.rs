//! What the Responses API needs besides the store: its page for operators, and the keys of state tokens.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tracing::info;

use crate::admin::ResponsesPage;
use crate::api::dry_run::DryRun;
use crate::config::Config;
use crate::http::drain::Tasks;
use crate::http::tls::Clients;
use crate::observe::metrics::Registry;
use crate::responses::{Mode, Responses};
use crate::state_token::KeyRing;
use crate::store::{OpenStore, ResponseStore};
use crate::webhooks::Webhooks;

pub(super) fn responses_page(
    store: Arc<dyn ResponseStore>,
    responses: Arc<Responses>,
    dry_run: Arc<ArcSwap<DryRun>>,
) -> ResponsesPage {
    // Numbers and names always serialize.
    let counts = move || serde_json::to_value(responses.counts()).unwrap_or_default();
    let dry_run =
        move |api, tenant: Option<String>, body| -> Pin<Box<dyn Future<Output = _> + Send>> {
            let dry_run = dry_run.load_full();
            Box::pin(async move { dry_run.engine_body(api, tenant.as_deref(), body).await })
        };
    ResponsesPage::new(store, Box::new(counts), Box::new(dry_run))
}

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
    tasks.spawn_until_stopped(webhooks.clone().run());
    webhooks
}

/// What signs the state that clients keep.
pub(super) fn key_ring(config: &Config, metrics: &Registry) -> io::Result<KeyRing> {
    let settings = config.responses.state_token.clone();
    let settings = settings.within(config.api.requests.max_body);
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
    KeyRing::new(settings, own, metrics)
        .map_err(|problems| io::Error::other(format!("{problems:?}")))
}
