//! `/v1/models`: the models of all workers, and the names that the configuration leads to one of them. Each entry is
//! copied byte for byte from a worker's own list; a configured name has that of its model, with its own `id`. A tenant
//! sees those that it may use.

use std::borrow::Cow;
use std::collections::BTreeMap;

use hyper::Response;

use crate::fleet::Snapshot;
use crate::limits::TenantLimits;
use crate::openai::error::ApiError;
use crate::openai::splice;
use crate::relay::request::target::{Name, Names};
use crate::{http, observe, relay};

pub(super) fn list(
    fleet: &Snapshot,
    names: &Names,
    limits: Option<&TenantLimits>,
) -> Response<http::Body> {
    let is_allowed = |name: &str| limits.is_none_or(|limits| limits.allows(name));
    let is_name_allowed =
        |name: &&Name| is_allowed(&name.requested) || name.models().any(|model| is_allowed(model));
    let served = fleet.models.iter();
    let served = served.filter(|(model, _)| is_allowed(model));
    let mut cards: BTreeMap<&str, Cow<'_, str>> = served
        .map(|(model, group)| (&**model, Cow::Borrowed(group.card.get())))
        .collect();
    for name in names.iter().filter(is_name_allowed) {
        if let Some(card) = card(fleet, name) {
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
    fleet: &Snapshot,
    names: &Names,
    limits: Option<&TenantLimits>,
    name: &str,
) -> Result<Response<http::Body>, ApiError> {
    // SDKs escape the slash of `org/name`.
    let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
    let card = match names.get(&name) {
        Some(name) => card(fleet, name),
        None => {
            let group = fleet.models.get(name.as_ref());
            group.map(|group| Cow::Borrowed(group.card.get()))
        }
    };
    let is_allowed = |name: &str| limits.is_none_or(|limits| limits.allows(name));
    let may_use = |name: &str| {
        let mut targets = names.get(name).into_iter().flat_map(Name::models);
        is_allowed(name) || targets.any(|model| is_allowed(model))
    };
    let Some(card) = card.filter(|_| may_use(&name)) else {
        let mut known = names.known(fleet);
        known.retain(|name| may_use(name));
        let model = observe::shortened(&name).to_owned();
        return Err(relay::Error::UnknownModel { model, known }.into());
    };
    Ok(http::json(card.into_owned()))
}

/// The entry of a configured name; `None` while none of its models is served.
fn card<'f>(fleet: &'f Snapshot, name: &Name) -> Option<Cow<'f, str>> {
    let mut groups = name.models().filter_map(|model| fleet.models.get(model));
    let card = groups.next()?.card.get();
    Some(splice::with_text(card, "id", &name.requested))
}
