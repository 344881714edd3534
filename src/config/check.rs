//! What types and bounds cannot say: rules between settings, and the values of texts. Each part checks its own
//! settings; the rules between parts stand here.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use super::discovery::{DiscoveryEntry, no_connector};
use super::model_names;
use super::reader::Reader;
use super::settings::Config;
use super::tls;
use super::token_sources;
use super::tokenizer::Tokenizer;
use super::watched::is_missing;
use crate::fleet::discovery::kubernetes;
use crate::fleet::discovery::{WorkerDefaults, WorkerSpec};
use crate::fleet::{Member, Role};
use crate::http::listen_address::listen_address;
use crate::jwt;
use crate::observe::{self, line_log};
use crate::openai::tenant;
use crate::relay::KeySource;
use crate::responses::Mode;
use crate::traces;
use crate::webhooks::{EventType, KnownTenants};

/// Adds everything that is wrong with a configuration whose values have the right types.
pub(super) fn check(config: &mut Config, reader: &mut Reader) {
    check_listeners(config, reader);
    check_workers(config, reader);
    check_topology(config, reader);
    check_models(config, reader);
    model_names::check(&config.models, reader);
    check_retries(config, reader);
    check_replicas(config, reader);
    // A secret that was refused is reported where it stands.
    let has_proof =
        config.peers.has_proof() || reader.is_any_refused(&["peers.secret", "peers.tls"]);
    let peers_listen = listen_address(&config.peers.listen);
    reader.part_problems("peers.", config.peers.check(peers_listen, has_proof));
    if config.limits.everybody.is_some() && !config.tenants.is_empty() {
        let message = "has no effect beside `tenants`; write it as `limits` of each tenant";
        reader.problem("limits.everybody", message);
    }
    let found = tenant::check(&config.tenants, config.jwt.is_some());
    reader.part_problems("tenants", found);
    check_tenant_keys(config, reader);
    if let Some(queue) = config.queue.settings() {
        reader.part_problems("queue.", queue.check());
    }
    reader.part_problems("limits.", config.limits.check());
    let salt_key = &config.tenant_salt_key;
    if !salt_key.is_empty() && salt_key.expose().len() < SECRET_BYTES_MIN {
        let message = format!("must have at least {SECRET_BYTES_MIN} characters");
        reader.problem("tenant_salt_key", message);
    }
    reader.part_problems("responses.", config.responses.check());
    check_batches(config, reader);
    if let Err(error) = observe::check_level(&config.log.level) {
        reader.problem("log.level", error);
    }
    if let Err(error) = line_log::check(&config.log.access_file, "access.jsonl") {
        let is_absent = is_folder_missing(&config.log.access_file);
        reader.file_problem("log.access_file", is_absent, error);
    }
    reader.part_problems("api.", config.api.requests.check());
    if let Err(error) = config.usage.check() {
        reader.file_problem("usage.log", is_folder_missing(&config.usage.log), error);
    }
    check_traces(config, reader);
    check_jwt(config, reader);
    check_webhooks(config, reader);
    tls::check(config, reader);
    token_sources::check(config, reader);
}

/// Whether the folder of a log's file is not there.
fn is_folder_missing(log: &str) -> bool {
    let folder = Path::new(log).parent().and_then(Path::to_str);
    folder.is_some_and(is_missing)
}

/// A secret of 16 random characters cannot be guessed over a network.
const SECRET_BYTES_MIN: usize = 16;

fn check_listeners(config: &Config, reader: &mut Reader) {
    let listeners = [
        ("api.listen", &config.api.listen),
        ("admin.listen", &config.admin.listen),
        ("peers.listen", &config.peers.listen),
        ("endpoint_picker.listen", &config.endpoint_picker.listen),
    ];
    let used = listeners.map(|(path, listen)| (path, listen, listen_address(listen)));
    for (index, (path, listen, address)) in used.iter().enumerate() {
        let address = match address {
            Ok(address) => address,
            // Left out; peers are checked with the rest of their settings.
            Err(_) if listen.is_empty() && index > 1 || *path == "peers.listen" => continue,
            Err(error) => {
                reader.problem(path, error);
                continue;
            }
        };
        let mut earlier = used[..index].iter();
        let same = earlier.find(|(_, _, other)| {
            other
                .as_ref()
                .is_ok_and(|other| is_same_port(other, address))
        });
        if let Some((other, at, _)) = same {
            let message = format!("has the port of `{other}` (`{at}`); give it another one");
            reader.problem(path, message);
        }
    }
    let admin = listen_address(&config.admin.listen).ok();
    let is_loopback = admin.is_none_or(|address| address.ip().to_canonical().is_loopback());
    if !is_loopback && !config.admin.has_credentials() {
        let message = format!(
            "`{}` can be reached from other hosts, whose users could drain workers and see prompts: set `admin.token` \
             (such as `file:/run/secrets/admin-token`; probes and Prometheus do not need it), or listen on 127.0.0.1",
            config.admin.listen
        );
        let credentials = ["admin.token", "admin.tokens", "admin.client_names"];
        reader.conflict("admin.listen", &credentials, message);
    }
    for (key, error) in config.admin.check() {
        let path = format!("admin.{key}");
        // Names of clients are held against their CA.
        if key.starts_with("client_names") {
            reader.conflict(&path, &["admin.tls"], error);
        } else {
            reader.problem(&path, error);
        }
    }
}

/// True if two listeners cannot both have their address: the same port at the same IP address, or at all of them.
fn is_same_port(left: &SocketAddr, right: &SocketAddr) -> bool {
    let any = left.ip().is_unspecified() || right.ip().is_unspecified();
    left.port() != 0 && left.port() == right.port() && (any || left.ip() == right.ip())
}

/// Keys that can be guessed are refused where other hosts can try them.
fn check_tenant_keys(config: &Config, reader: &mut Reader) {
    let api = listen_address(&config.api.listen);
    if api.is_ok_and(|address| address.ip().to_canonical().is_loopback()) {
        return;
    }
    let found = tenant::check_strength(&config.tenants, SECRET_BYTES_MIN);
    reader.part_problems("tenants", found);
}

fn check_workers(config: &Config, reader: &mut Reader) {
    let is_empty = config.workers.is_empty() && config.discovery.is_empty();
    // Entries that were refused are reported where they stand.
    if is_empty && !reader.is_refused("discovery") {
        let message = "there are no workers: list their URLs under `workers`, or add a file, a DNS name or \
                       Kubernetes under `discovery`";
        reader.problem("workers", message);
    }
    let mut seen = BTreeMap::new();
    let none = WorkerDefaults::default();
    check_list("workers", &config.workers, &none, config, &mut seen, reader);
    for (index, entry) in config.discovery.iter().enumerate() {
        let path = format!("discovery[{index}].{}", entry.kind());
        let defaults = entry.defaults();
        match defaults.member(String::new()) {
            Ok(_) if is_role_without_connector(defaults.role, config) => {
                let message = no_connector(defaults.role);
                reader.conflict(&format!("{path}.role"), &[CONNECTOR], message);
            }
            Ok(_) => {}
            Err((key, error)) => reader.problem(&format!("{path}.{key}"), error),
        }
        match entry {
            DiscoveryEntry::Static(list) => {
                let path = format!("{path}.workers");
                check_list(&path, &list.workers, defaults, config, &mut seen, reader);
            }
            DiscoveryEntry::File(file) if file.path.is_empty() => {
                reader.problem(&format!("{path}.path"), "is empty");
            }
            DiscoveryEntry::Dns(dns) if dns.name.is_empty() => {
                reader.problem(&format!("{path}.name"), "is empty");
            }
            DiscoveryEntry::Dns(dns) if dns.name.contains([':', '/']) => {
                let name = &dns.name;
                let message = format!("`{name}` must be a name alone; the port has its own key");
                reader.problem(&format!("{path}.name"), message);
            }
            DiscoveryEntry::Kubernetes(entry) => check_kubernetes(entry, &path, reader),
            DiscoveryEntry::File(_) | DiscoveryEntry::Dns(_) => {}
        }
        let is_repeated = config.discovery[..index].iter().any(|other| {
            matches!((other, entry), (DiscoveryEntry::File(a), DiscoveryEntry::File(b)) if a.path == b.path)
                || matches!((other, entry), (DiscoveryEntry::Dns(a), DiscoveryEntry::Dns(b))
                    if (&a.name, a.port) == (&b.name, b.port))
                || matches!((other, entry), (DiscoveryEntry::Kubernetes(a), DiscoveryEntry::Kubernetes(b))
                    if a.name() == b.name())
        });
        if is_repeated {
            reader.problem(&path, "is listed twice");
        }
    }
    check_dns_roles(config, reader);
}

fn not_built_in(what: &str, feature: &str) -> String {
    format!(
        "this build cannot {what}: it was made without the feature `{feature}`; build from source with `make dist`, \
         which has all features, or with `cargo build --release --features {feature}`"
    )
}

fn check_traces(config: &Config, reader: &mut Reader) {
    let Some(settings) = &config.traces else {
        return;
    };
    if !traces::IS_BUILT_IN {
        reader.problem("traces", not_built_in("export traces", "otlp"));
    }
    reader.part_problems("traces.", settings.check());
}

fn check_jwt(config: &Config, reader: &mut Reader) {
    let Some(settings) = &config.jwt else {
        return;
    };
    if !jwt::IS_BUILT_IN {
        reader.problem("jwt", not_built_in("verify tokens", "jwt"));
    }
    reader.part_problems("jwt.", settings.check());
    for (index, issuer) in settings.issuers.iter().enumerate() {
        let Some(file) = issuer.file() else { continue };
        if let Err(error) = jwt::check_file(&file) {
            let path = format!("jwt.issuers[{index}].jwks");
            reader.file_problem(&path, is_missing(&file), error);
        }
    }
    let name = &settings.default_tenant;
    if config.tenants.is_empty() {
        let message = "needs `tenants`: list those that tokens name (they need no `keys`), or one, and write its name in \
                       `jwt.default_tenant` for all tokens";
        reader.conflict("jwt", &["tenants"], message);
    } else if !name.is_empty() && !config.tenants.iter().any(|tenant| tenant.name == *name) {
        let message = format!("`{name}` is none of `tenants`");
        reader.conflict("jwt.default_tenant", &["tenants"], message);
    }
}

fn check_kubernetes(entry: &kubernetes::Settings, path: &str, reader: &mut Reader) {
    if !kubernetes::IS_BUILT_IN {
        let message = not_built_in("ask the Kubernetes API", "kubernetes");
        reader.problem(path, message);
    }
    for (key, error) in entry.check() {
        let path = match key {
            "" => path.to_owned(),
            key => format!("{path}.{key}"),
        };
        reader.problem(&path, error);
    }
}

fn check_list(
    path: &str,
    workers: &[WorkerSpec],
    defaults: &WorkerDefaults,
    config: &Config,
    seen: &mut BTreeMap<String, String>,
    reader: &mut Reader,
) {
    for (index, worker) in workers.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let Member {
            name,
            address,
            role,
            ..
        } = match worker.member(defaults) {
            Ok(member) => member,
            // That of the entry is reported once.
            Err((key, _)) if key != "url" && defaults.member(String::new()).is_err() => continue,
            Err((key, error)) => {
                reader.problem(&format!("{path}.{key}"), error);
                continue;
            }
        };
        if worker.role.is_some() && is_role_without_connector(role, config) {
            reader.conflict(&format!("{path}.role"), &[CONNECTOR], no_connector(role));
        }
        for (key, text) in [("url", address), ("name", name)] {
            let first = seen.entry(text.clone()).or_insert_with(|| path.clone());
            if *first != path {
                let message = format!("`{text}` is {} already", reader.name(first));
                reader.problem(&format!("{path}.{key}"), message);
                // The default name is the address: one message is enough.
                break;
            }
        }
    }
}

const CONNECTOR: &str = "prefill_decode.connector";

/// A role is what an engine was started as. Without KV transfer prefill workers would idle, and a decode worker
/// would get whole requests, which might be a mistake.
fn is_role_without_connector(role: Role, config: &Config) -> bool {
    role != Role::Both && config.prefill_decode.connector.is_none()
}

/// Prefill workers behind one DNS name mean that those behind another one decode. Left at `both`, each of these
/// would be asked to compute prompts for others as well.
fn check_dns_roles(config: &Config, reader: &mut Reader) {
    let dns = || {
        let entries = config.discovery.iter().enumerate();
        entries.filter(|(_, entry)| matches!(entry, DiscoveryEntry::Dns(_)))
    };
    let has_prefill = dns().any(|(_, entry)| entry.defaults().role == Role::Prefill);
    if !has_prefill || config.prefill_decode.connector.is_none() {
        return;
    }
    let has_decode = dns().any(|(_, entry)| entry.defaults().role == Role::Decode);
    for (index, entry) in dns() {
        if entry.defaults().role == Role::Both && !has_decode {
            reader.problem(
                &format!("discovery[{index}].dns.role"),
                "is `both`, so that these workers would compute prompts for others too, beside the prefill \
                 workers of another entry; write `role: decode`",
            );
        }
    }
}

/// A label that is misspelt is no topology, and blocks would pass from anywhere to anywhere. What a file lists is
/// not known yet.
fn check_topology(config: &Config, reader: &mut Reader) {
    let topology = &config.prefill_decode.topology;
    if topology.is_empty() || config.prefill_decode.connector.is_none() {
        return;
    }
    let may_have_it = |entry: &DiscoveryEntry| {
        matches!(
            entry,
            DiscoveryEntry::File(_) | DiscoveryEntry::Kubernetes(_)
        ) || entry.defaults().labels.contains_key(topology)
    };
    let has_it = |member: Member| member.labels.contains_key(topology);
    if !config.discovery.iter().any(may_have_it) && !config.members().into_iter().any(has_it) {
        let message = format!(
            "no worker has the label `{topology}`, so that any two would be a pair; add it to the workers' \
             `labels` or to those of their discovery entry, or leave this out"
        );
        reader.conflict(
            "prefill_decode.topology",
            &["workers", "discovery"],
            message,
        );
    }
}

fn check_models(config: &Config, reader: &mut Reader) {
    let own = config.models.iter().enumerate().map(|(index, model)| {
        let keys = model.hash_on.as_deref().unwrap_or_default();
        (format!("models[{index}].hash_on"), keys)
    });
    let common = ("routing.hash_on".to_owned(), &*config.routing.hash_on);
    for (path, keys) in std::iter::once(common).chain(own) {
        for (index, key) in keys.iter().enumerate() {
            if let Err(error) = key.parse::<KeySource>() {
                reader.problem(&format!("{path}[{index}]"), error);
            }
        }
    }
    // A LoRA adapter sends those of its base model, which is known only once engines have answered.
    let tokenizers = config
        .models
        .iter()
        .filter_map(|model| model.tokenizer.as_ref());
    let has_tokenizer = tokenizers.into_iter().any(Tokenizer::is_set);
    for (index, model) in config.models.iter().enumerate() {
        if model.send_token_ids == Some(true) && !has_tokenizer {
            let message = "there are none to send: no model has a tokenizer here";
            reader.conflict(
                &format!("models[{index}].send_token_ids"),
                &["models"],
                message,
            );
        }
        if config.models[..index]
            .iter()
            .any(|other| other.name == model.name)
        {
            let message = format!("`{}` is listed twice", model.name);
            reader.problem(&format!("models[{index}].name"), message);
        }
    }
}

fn check_retries(config: &Config, reader: &mut Reader) {
    let statuses = config.requests.advanced.retry_statuses.iter();
    for (index, status) in statuses.enumerate() {
        if !(429..600).contains(status) {
            let message = format!(
                "{status} is an answer, not a reason to try another worker; use 429 or 5xx"
            );
            reader.problem(
                &format!("requests.advanced.retry_statuses[{index}]"),
                message,
            );
        }
    }
}

fn check_replicas(config: &Config, reader: &mut Reader) {
    let responses = &config.responses;
    if responses.mode == Mode::PassThrough {
        return;
    }
    let (has_several, has_redis) = (config.peers.is_on(), responses.store.redis.is_some());
    if has_several && !has_redis {
        reader.problem(
            "responses.store",
            "is memory, which each replica has for itself, so that none would know the responses of the others; \
             keep them in Redis (`store: {redis: \"redis://HOST:6379\"}`), or keep none (`mode: pass_through`)",
        );
    }
    if responses.state_token.keys.is_empty() && (has_several || has_redis) {
        let reason = if has_redis {
            "with `responses.store.redis`"
        } else {
            "with several replicas"
        };
        let message = format!(
            "{reason} a key is needed, so that restarted and other replicas can verify state tokens; make one \
             with `openssl rand -hex 32`"
        );
        reader.problem("responses.state_token.keys", message);
    }
}

/// Batches are off where the file does not have them. Settings of them without storage would do nothing.
fn check_batches(config: &Config, reader: &mut Reader) {
    let has_storage = reader.has("batches.folder") || reader.has("batches.s3");
    if reader.has("batches") && !has_storage {
        let message = "has neither `folder` nor `s3`, so that there would be no batches: write one of them, or leave \
                       out `batches`";
        reader.problem("batches", message);
    }
    let has_redis = config.responses.store.redis.is_some();
    if config.batches.is_on() && config.peers.is_on() && !has_redis {
        let message = "would be in the memory of each replica, so that none would know those of the others: with \
                       `peers`, write `responses: {store: {redis: \"redis://HOST:6379\"}}`, with any `mode`";
        reader.conflict("batches", &["peers", "responses.store"], message);
    }
    reader.part_problems("batches.", config.batches.check());
}

fn check_webhooks(config: &Config, reader: &mut Reader) {
    if config.webhooks.endpoints.is_empty() {
        return;
    }
    let names: Vec<&str> = config.tenants.iter().map(|tenant| &*tenant.name).collect();
    let takes_other_tenants = |jwt: &jwt::Settings| !jwt.default_tenant.is_empty();
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
    if config.responses.mode != Mode::PassThrough {
        return;
    }
    if !config.batches.is_on() {
        let message = "would never get an event: there are no background responses with `responses.mode: pass_through`, \
                       and no batches without `batches`";
        return reader.conflict("webhooks.endpoints", &["batches"], message);
    }
    let is_of_batches = |event: &EventType| event.as_str().starts_with("batch.");
    for (index, endpoint) in config.webhooks.endpoints.iter().enumerate() {
        let events = &endpoint.events;
        if !events.is_empty() && !events.iter().any(is_of_batches) {
            let message = "lists only events of background responses, and there are none with `responses.mode: pass_through`";
            reader.problem(&format!("webhooks.endpoints[{index}].events"), message);
        }
    }
}
