//! The parts of a running router that a new configuration reaches.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;

use super::reading::read;
use crate::admin::AdminServer;
use crate::api::ApiServer;
use crate::api::dry_run::DryRun;
use crate::app::discoveries::FollowedDiscoveries;
use crate::app::tenants;
use crate::app::tls::{self, Listeners};
use crate::app::traces;
use crate::batches::Batches;
use crate::config::Config;
use crate::fleet::registry::Registry;
use crate::http::io_threads::OffloadThread;
use crate::limits::Limiter;
use crate::observe;
use crate::relay::prompt::tokens::Tokens;
use crate::webhooks::Webhooks;

/// What requests read hangs on one pointer, `api`: a request loads it once, when it starts.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) api: Arc<ArcSwap<ApiServer>>,
    pub(crate) admin: Arc<AdminServer>,
    pub(crate) dry_run: Arc<ArcSwap<DryRun>>,
    pub(crate) tokens: Arc<ArcSwap<Tokens>>,
    pub(crate) fleet: Arc<Registry>,
    pub(crate) tls: Listeners,
    pub(crate) discoveries: FollowedDiscoveries,
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) webhooks: Arc<Webhooks>,
    pub(crate) batches: Option<Arc<Batches>>,
}

impl Parts {
    /// Uses a configuration that was checked and whose changes are all possible. After an error, which is not the file's
    /// fault, listeners may have the new TLS already; nothing else has changed.
    pub(super) async fn apply(
        &mut self,
        config: &Arc<Config>,
        thread: &OffloadThread,
    ) -> io::Result<()> {
        // The caller's thread accepts connections, and a file system may hang.
        let (listeners, next) = (self.tls.clone(), config.clone());
        let known = self.fleet.tls().clone();
        let reads = move || {
            let problems = listeners.replace(&next);
            (problems, next.token_sources(), tls::clients(&next, &known))
        };
        let files = read(thread, reads).await;
        let (problems, sources, clients) =
            files.ok_or_else(|| io::Error::other("the read of files ended without a result"))?;
        if !problems.is_empty() {
            return Err(io::Error::other(format!("{problems:?}")));
        }
        let sources = sources.map_err(io::Error::other)?;
        let tokens = Arc::new(self.tokens.load().successor(sources)?);
        let running = self.api.load_full();
        let tenants = config.salted_tenants();
        let callers = running.tenants.successor(&tenants, config.jwt.as_ref());
        let callers = callers.map_err(io::Error::other)?;
        let mut relay = running.relay.successor(
            config.requests.clone(),
            config.model_settings(),
            &config.prefill_decode,
            tokens.clone(),
            tenants::table(config, &self.limiter),
            config.queue.settings().cloned(),
        );
        relay.tracer = traces::successor(&running.relay.tracer, config);
        let relay = Arc::new(relay);
        let responses = running
            .responses
            .successor(config.responses_settings(), relay.clone());
        let settings = config.api.requests.clone();
        let api = running.successor(settings, callers, responses.clone(), relay.clone());
        self.fleet.set_settings(config.registry_settings());
        self.discoveries.replace(config, thread).await;
        self.fleet.tls().keep(clients);
        let max_body = config.api.requests.max_body;
        responses.set_bounds(max_body);
        self.api.store(api);
        self.tokens.store(tokens);
        self.dry_run
            .store(Arc::new(DryRun::new(responses, &tenants)));
        self.admin.set(relay, &config.admin, max_body);
        self.webhooks.replace(&config.webhooks);
        if let Some(batches) = &self.batches {
            batches.on_reload();
        }
        observe::set_log_level(&config.log);
        Ok(())
    }
}
