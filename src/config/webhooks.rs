//! The rules between webhooks and the rest of the configuration.

use super::reader::Reader;
use super::settings::Config;
use crate::responses::Mode;
use crate::webhooks::KnownTenants;

pub(super) fn check(config: &Config, reader: &mut Reader) {
    if config.webhooks.endpoints.is_empty() {
        return;
    }
    let names: Vec<&str> = config.tenants.iter().map(|tenant| &*tenant.name).collect();
    let takes_other_tenants = |jwt: &crate::jwt::Settings| !jwt.default_tenant.is_empty();
    let tenants = KnownTenants {
        names: &names,
        are_open: config.jwt.as_ref().is_some_and(takes_other_tenants),
    };
    for (key, error) in config.webhooks.check(tenants) {
        let path = format!("webhooks.{key}");
        if key.ends_with(".tenant") {
            reader.conflict(&path, &["tenants"], error);
        } else {
            reader.problem(&path, error);
        }
    }
    if config.responses.mode == Mode::PassThrough {
        let message = "would never get an event: there are no background responses with `responses.mode: pass_through`";
        reader.problem("webhooks.endpoints", message);
    }
}
