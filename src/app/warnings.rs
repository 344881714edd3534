//! What works and is not as it should be: the start and a reload log it, and `check` prints it.

use super::{memory_bounds, traces};
use crate::config::{Config, DiscoveryEntry, ModelOverride, Tokenizer};
use crate::fleet::Role;
use crate::fleet::discovery::WorkerSpec;
use crate::fleet::events::EventsSpec;
use crate::observe;
use crate::relay::request::target::Sticky;
use crate::routing::{self, Policy};

/// One line each: keys that are not used, or not without another one, tenants that share caches, limits that requests do
/// not fit into, environment variables that cannot be used.
pub fn of(config: &Config) -> Vec<String> {
    let mut warnings = config.source.warnings.clone();
    warnings.extend(shared_caches(config));
    warnings.extend(small_bursts(config));
    warnings.extend(traces::warnings(config));
    warnings.extend(prefill_workers_only(config));
    warnings.extend(parts_that_are_off(config));
    warnings.extend(unused_hash_on(config));
    warnings.extend(unused_event_keys(config));
    warnings.extend(tokenizers_without_folder(config));
    warnings.extend(empty_access_file(config));
    warnings
}

/// Also what depends on where the router runs, which may be elsewhere than `check` does.
pub(super) fn of_running(config: &Config) -> Vec<String> {
    let mut warnings = of(config);
    if let Some(limit) = observe::memory_limit::of_process() {
        warnings.extend(memory_bounds::warning(config, limit));
    }
    warnings
}

/// Parts with settings that nothing reads while the key that turns them on is left out or empty.
fn parts_that_are_off(config: &Config) -> Vec<String> {
    let default = Config::default();
    let (cors, default_cors) = (&config.api.requests.cors, &default.api.requests.cors);
    let parts = [
        (
            "prefill_decode.connector",
            config.prefill_decode.connector.is_some(),
            config.prefill_decode != default.prefill_decode,
        ),
        (
            "peers.listen",
            config.peers.is_on(),
            config.peers != default.peers,
        ),
        (
            "endpoint_picker.listen",
            config.endpoint_picker.is_on(),
            config.endpoint_picker != default.endpoint_picker,
        ),
        (
            "api.cors.allowed_origins",
            !cors.allowed_origins.is_empty(),
            cors != default_cors,
        ),
        (
            "usage.log",
            !config.usage.log.is_empty(),
            config.usage != default.usage,
        ),
    ];
    let unused = parts.iter().filter(|(_, is_on, is_set)| *is_set && !is_on);
    let warning = |(key, _, _): &(&str, bool, bool)| {
        format!("{key} is not set, so that the keys beside it do nothing")
    };
    unused.map(warning).collect()
}

/// Keys of sessions that no model looks at.
fn unused_hash_on(config: &Config) -> Vec<String> {
    let common = &config.routing;
    let uses_it = |model: &ModelOverride| {
        let policy = model.policy.unwrap_or(common.policy);
        policy == Policy::ConsistentHash || model.sticky == Sticky::Session
    };
    let mut models = config.models.iter();
    let is_used = common.policy == Policy::ConsistentHash
        || models.any(|model| model.hash_on.is_none() && uses_it(model));
    let is_default = common.hash_on == routing::Settings::default().hash_on;
    let mut paths = Vec::new();
    if !is_default && !is_used {
        paths.push("routing.hash_on".to_owned());
    }
    for (index, model) in config.models.iter().enumerate() {
        if model.hash_on.is_some() && !uses_it(model) {
            paths.push(format!("models[{index}].hash_on"));
        }
    }
    let warning = |path: String| {
        format!(
            "{path} does nothing: it is for `policy: consistent_hash`, and for `targets` with `sticky: session`"
        )
    };
    paths.into_iter().map(warning).collect()
}

/// What is set of a worker's KV events although the engine says it, or nothing is received.
fn unused_event_keys(config: &Config) -> Option<String> {
    let mut found = Vec::new();
    let mut look = |path: String, events: Option<&EventsSpec>| {
        if events.is_some_and(EventsSpec::has_unused_keys) {
            found.push(path);
        }
    };
    for (index, worker) in config.workers.iter().enumerate() {
        look(format!("workers[{index}]"), worker.events.as_ref());
    }
    for (index, entry) in config.discovery.iter().enumerate() {
        let path = format!("discovery[{index}].{}", entry.kind());
        for (index, worker) in entry.listed().iter().enumerate() {
            look(format!("{path}.workers[{index}]"), worker.events.as_ref());
        }
        look(path, Some(&entry.defaults().events));
    }
    let first = found.first()?;
    let more = match found.len() - 1 {
        0 => String::new(),
        others => format!(" (and {others} more)"),
    };
    Some(format!(
        "{first}.events{more}: `topic` and `ranks` do nothing without `from: zmq` or `from: grpc`; with `auto` the engine says \
         what each of its ranks publishes"
    ))
}

/// Settings of tokenizers that there are not.
fn tokenizers_without_folder(config: &Config) -> Vec<String> {
    let default = Tokenizer::default();
    let is_lacking = |tokenizer: &Tokenizer| {
        let has_source = tokenizer.from != default.from || !tokenizer.path.is_empty();
        !has_source && *tokenizer != default
    };
    let models = config.models.iter().enumerate();
    let lacking = models.filter(|(_, model)| model.tokenizer.as_ref().is_some_and(is_lacking));
    let warning = |(index, _): (usize, &ModelOverride)| {
        format!("models[{index}].tokenizer has no `path`, so that the rest of it does nothing")
    };
    lacking.map(warning).collect()
}

/// A file for lines that `log.access` or `log.level` leave out.
fn empty_access_file(config: &Config) -> Option<String> {
    let is_empty = !config.log.access_file.is_empty() && !observe::has_access_lines(&config.log);
    is_empty.then(|| {
        "log.access_file stays empty: its lines need `log.access: true`, and `log.level: info` or a directive such as \
         `warn,warmroute::access=info`"
            .to_owned()
    })
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

    fn config(rest: &str) -> Config {
        Config::parse("c.yaml", &format!("workers: ['http://a:1']\n{rest}\n")).unwrap()
    }

    #[test]
    fn settings_of_a_part_that_is_off_are_warned_of_with_the_key_that_turns_it_on() {
        let check = |key: &str, off: &str, on: &str| {
            let expected = format!("{key} is not set, so that the keys beside it do nothing");
            assert_eq!(parts_that_are_off(&config(off)), [expected]);
            assert_eq!(parts_that_are_off(&config(on)), [""; 0]);
        };
        check(
            "prefill_decode.connector",
            "prefill_decode: {on_prefill_failure: fail}",
            "prefill_decode: {connector: nixl, on_prefill_failure: fail}",
        );
        check(
            "peers.listen",
            "peers: {secret: sixteen-bytes-at-least}",
            "peers: {listen: ':9701', secret: sixteen-bytes-at-least}\nresponses: {mode: pass_through}",
        );
        check(
            "endpoint_picker.listen",
            "endpoint_picker: {fallbacks: 0}",
            "endpoint_picker: {listen: ':9002', fallbacks: 0}",
        );
        check(
            "api.cors.allowed_origins",
            "api: {cors: {allowed_headers: [x-a]}}",
            "api: {cors: {allowed_headers: [x-a], allowed_origins: ['*']}}",
        );
        check(
            "usage.log",
            "usage: {max_queued_size: 1MiB, log: ''}",
            "usage: {max_queued_size: 1MiB, log: stdout}",
        );
        assert_eq!(parts_that_are_off(&config("")), [""; 0]);
    }

    #[test]
    fn keys_of_sessions_that_no_model_uses_are_warned_of() {
        let check = |rest: &str, expected: &[&str]| {
            let warnings = unused_hash_on(&config(rest));
            let paths = warnings.iter().filter_map(|line| line.split(' ').next());
            assert_eq!(paths.collect::<Vec<_>>(), expected, "{rest}");
        };
        let own = "models: [{name: m, hash_on: [user]}]";
        check(own, &["models[0].hash_on"]);
        check(&format!("{own}\nrouting: {{policy: consistent_hash}}"), &[]);
        let common = "routing: {hash_on: [user]}";
        check(common, &["routing.hash_on"]);
        let hashed = "models: [{name: m, policy: consistent_hash}]";
        check(&format!("{common}\n{hashed}"), &[]);
        let split = "models: [{name: m, targets: [{model: a, weight: 1}], sticky: session}]";
        check(&format!("{common}\n{split}"), &[]);
    }

    #[test]
    fn settings_of_a_tokenizer_without_a_folder_are_warned_of() {
        let warnings = |tokenizer: &str| {
            let models = format!("models: [{{name: m, tokenizer: {tokenizer}}}]");
            tokenizers_without_folder(&config(&models))
        };
        let found = warnings("{content_format: openai}");
        let expected = "models[0].tokenizer has no `path`, so that the rest of it does nothing";
        assert_eq!(found, [expected]);
        for right in ["''", "{from: engine}"] {
            assert_eq!(warnings(right), [""; 0]);
        }
    }

    #[test]
    fn topics_and_ranks_that_nothing_reads_are_in_one_line() {
        let warned = |events: &str| {
            let worker = format!("{{url: 'http://b:1', events: {{{events}}}}}");
            let text = format!("workers: ['http://a:1', {worker}]\n");
            unused_event_keys(&Config::parse("c.yaml", &text).unwrap())
        };
        assert_eq!(warned("ranks: 1"), None);
        let read = "from: zmq, endpoint: 'tcp://*:5557', topic: t, ranks: 2";
        assert_eq!(warned(read), None);
        for unread in ["ranks: 2", "from: auto, topic: t", "from: 'off', topic: t"] {
            let warning = warned(unread).unwrap();
            assert!(warning.starts_with("workers[1].events: "), "{warning}");
        }
        let text = "discovery: [{static: {workers: ['http://a:1'], events: {ranks: 2}}}, \
                    {dns: {name: n.test, events: {topic: t}}}]\n";
        let warning = unused_event_keys(&Config::parse("c.yaml", text).unwrap()).unwrap();
        let first = "discovery[0].static.events (and 1 more): ";
        assert!(warning.starts_with(first), "{warning}");
    }

    #[test]
    fn a_file_for_an_access_log_without_lines_is_warned_of() {
        let is_warned = |rest: &str| {
            let config = config(&format!("log: {{access_file: stdout{rest}}}"));
            empty_access_file(&config).is_some()
        };
        assert!(!is_warned(""));
        assert!(is_warned(", access: false"));
        assert!(is_warned(", level: warn"));
        assert!(!is_warned(", level: 'warn,warmroute::access=info'"));
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
