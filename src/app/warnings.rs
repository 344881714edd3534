//! What works and is not as it should be: the start and a reload log it, and `check` prints it.

use super::traces;
use crate::config::{Config, DiscoveryEntry};
use crate::fleet::Role;
use crate::fleet::discovery::WorkerSpec;

/// One line each: keys that are not used, tenants that share caches, limits that requests do not fit into, environment
/// variables that cannot be used.
pub fn of(config: &Config) -> Vec<String> {
    let mut warnings = config.source.warnings.clone();
    warnings.extend(shared_caches(config));
    warnings.extend(small_bursts(config));
    warnings.extend(traces::warnings(config));
    warnings.extend(prefill_workers_only(config));
    warnings
}

/// Workers that compute prompts, and none that answers with them.
fn prefill_workers_only(config: &Config) -> Option<String> {
    let mut roles: Vec<Role> = config
        .workers
        .iter()
        .map(|worker| worker.role.unwrap_or_default())
        .collect();
    for entry in &config.discovery {
        // The others list workers that nobody knows yet.
        let DiscoveryEntry::Static(list) = entry else {
            return None;
        };
        let role = |worker: &WorkerSpec| worker.role.unwrap_or(list.defaults.role);
        roles.extend(list.workers.iter().map(role));
    }
    let is_lacking = !roles.is_empty() && roles.iter().all(|role| *role == Role::Prefill);
    is_lacking.then(|| {
        "all workers have `role: prefill`, so nobody answers and every request gets 503; list workers with `role: \
         decode` or `role: both`"
            .to_owned()
    })
}

fn shared_caches(config: &Config) -> Option<String> {
    let tenants = config.salted_tenants();
    let unsalted: Vec<&str> = tenants
        .iter()
        .filter(|tenant| tenant.cache_salt.is_empty())
        .map(|tenant| tenant.name.as_str())
        .collect();
    // One without a salt shares with nobody, but the default one stands for all whom tokens name.
    let default = config.jwt.as_ref().map(|jwt| jwt.default_tenant.as_str());
    let is_shared = unsalted.len() > 1 || default.is_some_and(|name| unsalted.contains(&name));
    is_shared.then(|| {
        "tenants share prefix caches: one can find out by time, usage and the decision header what another has asked; \
         set tenant_salt_key, or the tenants' cache_salt"
            .to_owned()
    })
}

/// Limits of tokens of which less may be used at once than a request reserves that names no `max_tokens`.
fn small_bursts(config: &Config) -> Option<String> {
    let reserve = config.limits.output_reserve;
    let everybody = config.limits.everybody.iter();
    let everybody = everybody.map(|limits| ("limits.everybody".to_owned(), limits));
    let tenants = config.tenants.iter().enumerate();
    let tenants = tenants.filter_map(|(index, tenant)| {
        let limits = tenant.limits.as_ref()?;
        Some((format!("tenants[{index}].limits"), limits))
    });
    let found = everybody.chain(tenants).flat_map(|(path, limits)| {
        let keys = limits.bursts_below_reserve(reserve).into_iter();
        keys.map(move |key| format!("{path}.{key}"))
    });
    let found: Vec<String> = found.collect();
    let more = match found.len().checked_sub(2) {
        None => String::new(),
        Some(others) => format!(" (and {} more)", others + 1),
    };
    let first = found.first()?;
    Some(format!(
        "{first}{more}: `burst` has room for fewer tokens than `limits.output_reserve` ({reserve}) reserves, so that \
         generating requests without `max_tokens` are refused; set a longer burst, `max_tokens`, or a smaller reserve"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jwt;

    #[test]
    fn prefill_workers_without_one_that_answers_are_warned_of() {
        let check = |rest: &str, is_warned: bool| {
            let text = format!("prefill_decode: {{connector: nixl}}\n{rest}\n");
            let config = Config::parse("c.yaml", &text).unwrap();
            assert_eq!(prefill_workers_only(&config).is_some(), is_warned, "{rest}");
        };
        let prefill = "{url: 'http://a:1', role: prefill}";
        check(&format!("workers: [{prefill}]"), true);
        check(&format!("workers: [{prefill}, 'http://b:1']"), false);
        let listed = "{static: {workers: ['http://b:1'], role: prefill}}";
        check(
            &format!("workers: [{prefill}]\ndiscovery: [{listed}]"),
            true,
        );
        let named = "{dns: {name: d, role: decode}}";
        check(
            &format!("workers: [{prefill}]\ndiscovery: [{named}]"),
            false,
        );
    }

    #[test]
    fn keys_of_before_and_tenants_that_share_caches_are_in_one_list() {
        let text = "workers: ['http://a:1']\nrouting: {prefill_weight: 4}\n\
                    tenants: [{name: a, keys: [aaaaaaaaaaaaaaaa]}, {name: b, keys: [bbbbbbbbbbbbbbbb]}]\n";
        let warnings = of(&Config::parse("c.yaml", text).unwrap());
        let has = |part: &str| warnings.iter().any(|warning| warning.contains(part));
        assert!(has("c.yaml:2:11: routing.prefill_weight"), "{warnings:?}");
        assert!(has("tenants share prefix caches"), "{warnings:?}");
    }

    #[test]
    fn limits_with_less_room_than_a_request_reserves_are_in_one_line() {
        let warned = |models: &str| {
            let text = format!(
                "workers: ['http://a:1']\nlimits: {{everybody: {{burst: 1s, models: [{models}]}}}}\n"
            );
            small_bursts(&Config::parse("c.yaml", &text).unwrap())
        };
        assert_eq!(warned("{name: a, requests_per_minute: 5}"), None);
        let small = warned("{name: a, tokens_per_minute: 6000}").unwrap();
        assert!(
            small.starts_with("limits.everybody.models[0].tokens_per_minute: "),
            "{small}"
        );
        let both = "{name: a, tokens_per_minute: 6000}, {name: b, tokens_per_minute: 6000}";
        assert!(
            warned(both)
                .unwrap()
                .contains("[0].tokens_per_minute (and 1 more): ")
        );
    }

    #[test]
    fn a_tenant_without_a_salt_beside_salted_ones_shares_if_it_is_the_default_of_tokens() {
        let text = "workers: ['http://a:1']\n\
                    tenants: [{name: a, keys: [aaaaaaaaaaaaaaaa]}, {name: b, keys: [bbbbbbbbbbbbbbbb], cache_salt: s}]\n";
        let mut config = Config::parse("c.yaml", text).unwrap();
        assert_eq!(shared_caches(&config), None);
        for (default_tenant, is_shared) in [("", false), ("a", true), ("b", false)] {
            config.jwt = Some(jwt::Settings {
                default_tenant: default_tenant.to_owned(),
                ..jwt::Settings::default()
            });
            assert_eq!(shared_caches(&config).is_some(), is_shared);
        }
    }
}
