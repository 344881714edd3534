//! The parts of a running router that a new configuration reaches.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::admin::{Access, AdminServer};
use crate::api::ApiServer;
use crate::api::dry_run::DryRun;
use crate::app::discoveries::FollowedDiscoveries;
use crate::app::responses_settings;
use crate::config::Config;
use crate::fleet::registry::Registry;
use crate::observe;
use crate::relay::tokens::Tokens;

/// What requests read hangs on one pointer, `api`: a request loads it once, when it starts.
#[derive(Debug)]
pub(in crate::app) struct Parts {
    pub(in crate::app) api: Arc<ArcSwap<ApiServer>>,
    pub(in crate::app) admin: Arc<AdminServer>,
    pub(in crate::app) dry_run: Arc<ArcSwap<DryRun>>,
    pub(in crate::app) tokens: Arc<ArcSwap<Tokens>>,
    pub(in crate::app) fleet: Arc<Registry>,
    pub(in crate::app) discoveries: FollowedDiscoveries,
}

impl Parts {
    /// Uses a configuration that was checked and whose changes are all possible. After an error, which is not the file's
    /// fault, nothing has changed.
    pub(super) async fn apply(&mut self, config: &Config) -> io::Result<()> {
        let sources = config.token_sources().map_err(io::Error::other)?;
        let tokens = Arc::new(self.tokens.load().successor(sources)?);
        let running = self.api.load_full();
        let relay = Arc::new(running.relay().successor(
            config.requests.clone(),
            config.model_settings(),
            &config.prefill_decode,
            tokens.clone(),
        ));
        let responses = running
            .responses()
            .successor(responses_settings(config), relay.clone());
        let tenants = config.salted_tenants();
        let settings = config.api.requests.clone();
        let api = running.successor(settings, &tenants, responses.clone(), relay.clone());
        self.fleet.set_settings(config.registry_settings());
        self.discoveries.replace(config).await;
        self.api.store(api);
        self.tokens.store(tokens);
        self.dry_run
            .store(Arc::new(DryRun::new(responses, &tenants)));
        self.admin.set(relay, Access::of(config));
        observe::set_log_level(&config.log);
        Ok(())
    }
}
