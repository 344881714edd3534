//! The body that an engine would be sent for a client's body, for `/explain`. Nothing is sent or stored.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use crate::ids::Tenant;
use crate::openai::splice;
use crate::openai::tenant::{Salt, TenantSpec};
use crate::prompt::Api;
use crate::responses::{Counts, Mode, Responses};

/// Prepares bodies as the API does, without asking for a key: an operator may do so for any tenant.
#[derive(Debug)]
pub struct DryRun {
    responses: Arc<Responses>,
    /// By the tenant's name.
    salts: HashMap<String, Option<Salt>>,
}

impl DryRun {
    pub fn new(responses: Arc<Responses>, tenants: &[TenantSpec]) -> Self {
        let salt = |tenant: &TenantSpec| (tenant.name.clone(), Salt::of(&tenant.cache_salt));
        Self {
            responses,
            salts: tenants.iter().map(salt).collect(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.responses.counts()
    }

    /// Prepares `body` as a request of the named tenant, for the API that an engine is sent; with no name there is no salt, and where tenants
    /// are configured there are no stored responses. An error says what is wrong with the body, or that
    /// there is no such tenant.
    pub async fn engine_body(
        &self,
        api: Api,
        tenant: Option<&str>,
        body: Bytes,
    ) -> Result<(Api, Bytes), String> {
        let salt = match tenant {
            None => None,
            Some(name) => match self.salts.get(name) {
                Some(salt) => salt.as_ref(),
                None => return Err(format!("no tenant is called `{name}`")),
            },
        };
        let salt = salt.map(|salt| salt.field.as_str());
        if api == Api::Responses && self.responses.mode() == Mode::Stateful {
            let tenant = tenant.map_or_else(Tenant::default, Tenant::of);
            return self.responses.dry_run(body, tenant, salt).await;
        }
        let body = match salt {
            Some(salt) => splice::first_field(&body, salt),
            None => body,
        };
        Ok((api, body))
    }
}
