//! What an engine would be sent for a client's body, but for what differs each time. Nothing is begun.

use std::sync::Arc;

use bytes::Bytes;
use rustc_hash::FxHashMap;

use crate::ids::Tenant;
use crate::openai::splice;
use crate::openai::tenant::{Listed, Salt};
use crate::prompt::Api;
use crate::responses::{Mode, Responses};

/// Foretells for anybody, whose key it does not ask for.
#[derive(Debug)]
pub struct Foreteller {
    responses: Arc<Responses>,
    /// By name.
    salts: FxHashMap<String, Option<Salt>>,
}

impl Foreteller {
    pub fn new(responses: Arc<Responses>, tenants: &[Listed]) -> Self {
        let salt = |tenant: &Listed| (tenant.name.clone(), Salt::of(&tenant.cache_salt));
        Self {
            responses,
            salts: tenants.iter().map(salt).collect(),
        }
    }

    /// For the tenant of that name; without one for nobody in particular, who has no responses where
    /// there are tenants, and no salt. An error says what is wrong with the body, or that nobody has the name.
    pub async fn foretell(
        &self,
        api: Api,
        tenant: Option<&str>,
        body: Bytes,
    ) -> Result<Bytes, String> {
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
            return self.responses.foretell(body, tenant, salt).await;
        }
        Ok(match salt {
            Some(salt) => splice::first_field(&body, salt),
            None => body,
        })
    }
}
