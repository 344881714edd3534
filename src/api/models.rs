//! `/v1/models`: the models of all workers, and the names that the configuration leads to one of them. Each entry is
//! copied byte for byte from a worker's own list; a configured name has that of its model, with its own `id`. A tenant
//! sees those that it may use. A model whose workers are all down is listed. One that no listed worker serves has no
//! entry to copy; asked for by its name, it is answered as a request for it is.

use std::borrow::Cow;
use std::collections::BTreeMap;

use hyper::Response;

use super::route::NO_API;
use crate::fleet::Snapshot;
use crate::http;
use crate::ids::Tenant;
use crate::openai::error::ApiError;
use crate::openai::splice;
use crate::relay::Relay;
use crate::relay::request::target::{Name, Names};

pub(super) fn list(relay: &Relay, tenant: Tenant) -> Response<http::Body> {
    let fleet = relay.fleet().snapshot();
    let limits = relay.tenants().of(tenant).limits.as_ref();
    let is_allowed = |name: &str| limits.is_none_or(|limits| limits.allows(name));
    let served = fleet.models.iter();
    let served = served.filter(|(model, _)| is_allowed(model));
    let mut cards: BTreeMap<&str, Cow<'_, str>> = served
        .map(|(model, group)| (&**model, Cow::Borrowed(group.card.get())))
        .collect();
    let may_use = |name: &&Name| relay.may_use(tenant, &name.requested);
    for name in relay.names().iter().filter(may_use) {
        if let Some(card) = card(&fleet, relay.names(), name) {
            cards.insert(&name.requested, card);
        }
    }
    let cards: Vec<&str> = cards.values().map(|card| &**card).collect();
    http::json(format!(
        "{{\"object\":\"list\",\"data\":[{}]}}",
        cards.join(",")
    ))
}

pub(super) fn one(
    relay: &Relay,
    tenant: Tenant,
    name: &str,
) -> Result<Response<http::Body>, ApiError> {
    let (fleet, names) = (relay.fleet().snapshot(), relay.names());
    // SDKs escape the slash of `org/name`.
    let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
    let card = match names.get(&name) {
        Some(name) => card(&fleet, names, name),
        None => {
            let group = fleet.models.get(name.as_ref());
            group.map(|group| Cow::Borrowed(group.card.get()))
        }
    };
    match card.filter(|_| relay.may_use(tenant, &name)) {
        Some(card) => Ok(http::json(card.into_owned())),
        None => Err(ApiError::of_run(relay.missing(NO_API, tenant, &name))),
    }
}

/// The entry of a configured name; `None` while none of its models is served.
fn card<'f>(fleet: &'f Snapshot, names: &Names, name: &Name) -> Option<Cow<'f, str>> {
    let models = names.models_of(name);
    let mut groups = models.filter_map(|model| fleet.models.get(model));
    let card = groups.next()?.card.get();
    Some(splice::with_text(card, "id", &name.requested))
}
