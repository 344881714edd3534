//! Whether the values make sense, beyond their types. Every complaint has its path.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use super::document::{Document, Problems};
use super::{Config, Dns, Events, Fleet, tokenizer};
use crate::fleet::Role;
use crate::fleet::discovery::bearer;
use crate::openai::tenant;
use crate::relay::KeySource;
use crate::responses::Mode;
use crate::routing::TierCredit;
use crate::{observe, store};

pub(super) fn check(mut document: Document<'_>) -> Result<Config, Problems> {
    let config: Option<Config> = document.read();
    if let Some(config) = &config {
        let mut wrong = |path: &str, message: String| document.problem(path, &message);
        check_listeners(config, &mut wrong);
        check_fleet(&config.fleet, &mut wrong);
        check_roles(config, &mut wrong);
        check_routing(config, &mut wrong);
        check_credits(config, &mut wrong);
        check_limits(config, &mut wrong);
        check_tokens(config, &mut wrong);
        check_tenants(config, &mut wrong);
        check_carrier(config, &mut wrong);
        if let Err(error) = observe::check_level(&config.log.level) {
            wrong("log.level", error);
        }
        tokenizer::check(config, &mut document);
    }
    document.finish(config)
}

type Wrong<'a> = dyn FnMut(&str, String) + 'a;

fn check_listeners(config: &Config, wrong: &mut Wrong<'_>) {
    for (path, listen) in [
        ("api.listen", &config.api.listen),
        ("admin.listen", &config.admin.listen),
    ] {
        if listen.parse::<SocketAddr>().is_err() {
            wrong(
                path,
                format!("`{listen}` is not an address and port such as 0.0.0.0:8080"),
            );
        }
    }
    let is_free_port = config.api.listen.ends_with(":0");
    if config.api.listen == config.admin.listen && !is_free_port {
        wrong(
            "admin.listen",
            "is the API's address; give it another port".to_owned(),
        );
    }
}

fn check_fleet(fleet: &Fleet, wrong: &mut Wrong<'_>) {
    let dns = &fleet.dns;
    let has_dns = !dns.name.is_empty() || !dns.prefill_name.is_empty();
    if fleet.workers.is_empty() && fleet.file.path.is_empty() && !has_dns {
        wrong(
            "fleet",
            "has no workers: list some under workers, or name a file or a dns name".to_owned(),
        );
    }
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for (place, worker) in fleet.workers.iter().enumerate() {
        let path = format!("fleet.workers[{place}]");
        let member = match worker.check() {
            Ok(member) => member,
            Err((key, error)) => {
                wrong(&format!("{path}.{key}"), error);
                continue;
            }
        };
        for (key, text) in [("url", &member.address), ("name", &member.name)] {
            if let Some(first) = seen.insert(text.clone(), place)
                && first != place
            {
                wrong(
                    &format!("{path}.{key}"),
                    format!("`{text}` is fleet.workers[{first}] already"),
                );
            }
        }
    }
    for (path, name) in [
        ("fleet.dns.name", &fleet.dns.name),
        ("fleet.dns.prefill_name", &fleet.dns.prefill_name),
    ] {
        if name.contains([':', '/']) {
            let message = format!("`{name}` must be a name alone; the port has its own key");
            wrong(path, message);
        }
    }
    if let Err(error) = bearer(&fleet.dns.api_key) {
        wrong("fleet.dns.api_key", error);
    }
    if let Err((key, error)) = fleet.dns.events.check() {
        wrong(&format!("fleet.dns.events.{key}"), error);
    }
}

/// A worker's role is what its engine was started as. Where nothing passes from one to the other, prefill workers
/// would idle, and a decode worker that is sent to as if it were whole might be a mistake.
fn check_roles(config: &Config, wrong: &mut Wrong<'_>) {
    let settings = &config.prefill_decode;
    if settings.connector.is_none() {
        let listed = config.fleet.workers.iter().enumerate();
        let listed = listed.map(|(place, it)| (format!("fleet.workers[{place}].role"), it.role));
        let dns = ("fleet.dns.role".to_owned(), config.fleet.dns.role);
        let prefill = match &*config.fleet.dns.prefill_name {
            "" => Role::Both,
            _ => Role::Prefill,
        };
        let prefill = ("fleet.dns.prefill_name".to_owned(), prefill);
        for (path, role) in listed
            .chain([dns, prefill])
            .filter(|(_, role)| *role != Role::Both)
        {
            wrong(&path, format!("{}", NoConnector(role)));
        }
    } else {
        check_dns_roles(&config.fleet.dns, wrong);
        check_topology(config, wrong);
    }
    if settings.bootstrap_port == 0 {
        wrong(
            "prefill_decode.bootstrap_port",
            "must be from 1 to 65535".to_owned(),
        );
    }
}

/// Who has prefill workers behind a name of their own means the others to answer. Left at `both`, each of them would
/// be asked to compute prompts for others as well.
fn check_dns_roles(dns: &Dns, wrong: &mut Wrong<'_>) {
    if !dns.name.is_empty() && !dns.prefill_name.is_empty() && dns.role == Role::Both {
        wrong(
            "fleet.dns.role",
            "is `both`, so that workers behind `name` would compute prompts for others too, beside those behind \
             `prefill_name`; write `role: decode`"
                .to_owned(),
        );
    }
}

/// A label that is misspelt is no topology, and blocks pass from anywhere to anywhere. What a file lists is not known
/// yet.
fn check_topology(config: &Config, wrong: &mut Wrong<'_>) {
    let (fleet, topology) = (&config.fleet, &config.prefill_decode.topology);
    let listed = fleet.workers.iter().map(|worker| &worker.labels);
    let mut labels = listed.chain([&fleet.dns.labels]);
    let is_known = labels.any(|labels| labels.contains_key(topology));
    if !topology.is_empty() && !is_known && fleet.file.path.is_empty() {
        wrong(
            "prefill_decode.topology",
            format!(
                "no worker has the label `{topology}`, so that any two would be a pair; write it under \
                 fleet.workers[].labels or fleet.dns.labels, or leave this out"
            ),
        );
    }
}

/// What is wrong with a role where requests are never split.
pub(super) struct NoConnector(pub(super) Role);

impl fmt::Display for NoConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` needs a connector, by which engines bring blocks to each other; write \
             `prefill_decode: {{connector: nixl}}` (or mooncake), or leave the role out",
            self.0
        )
    }
}

fn check_routing(config: &Config, wrong: &mut Wrong<'_>) {
    let mut weight = |path: &str, value: f64, min: f64| {
        if !value.is_finite() || value < min {
            wrong(
                path,
                format!("must be a number of at least {min}, not {value}"),
            );
        }
    };
    weight("routing.lambda", config.routing.lambda, 0.0);
    weight("routing.mu", config.routing.mu, 0.0);
    weight(
        "predicted.bytes_per_token",
        config.predicted.bytes_per_token,
        0.01,
    );
    for (place, model) in config.models.iter().enumerate() {
        weight(
            &format!("models[{place}].lambda"),
            model.lambda.unwrap_or(0.0),
            0.0,
        );
        weight(&format!("models[{place}].mu"), model.mu.unwrap_or(0.0), 0.0);
        weight(
            &format!("models[{place}].bytes_per_token"),
            model.bytes_per_token.unwrap_or(1.0),
            0.01,
        );
    }
    let own = config.models.iter().enumerate().map(|(place, model)| {
        (
            format!("models[{place}].hash_on"),
            model.hash_on.as_deref().unwrap_or_default(),
        )
    });
    for (path, keys) in
        std::iter::once(("routing.hash_on".to_owned(), &*config.routing.hash_on)).chain(own)
    {
        for (place, key) in keys.iter().enumerate() {
            if let Err(error) = key.parse::<KeySource>() {
                wrong(&format!("{path}[{place}]"), error);
            }
        }
    }
    for (place, model) in config.models.iter().enumerate() {
        if config.models[..place]
            .iter()
            .any(|other| other.name == model.name)
        {
            wrong(
                &format!("models[{place}].name"),
                format!("`{}` is listed twice", model.name),
            );
        }
    }
}

fn check_tokens(config: &Config, wrong: &mut Wrong<'_>) {
    let pool = &config.tokens.pool;
    let engine = &config.tokens.engine;
    let ranges = [
        ("tokens.pool.threads", u64::from(pool.threads), 1, 256),
        (
            "tokens.pool.queue_max",
            u64::from(pool.queue_max),
            1,
            1 << 20,
        ),
        ("tokens.pool.wait_ms", pool.wait_ms, 1, YEAR_MS),
        ("tokens.engine.timeout_ms", engine.timeout_ms, 1, YEAR_MS),
        (
            "tokens.engine.requests_max",
            u64::from(engine.requests_max),
            1,
            1 << 20,
        ),
        ("tokens.engine.age_max_ms", engine.age_max_ms, 0, YEAR_MS),
    ];
    for (path, value, min, max) in ranges {
        if !(min..=max).contains(&value) {
            wrong(path, format!("must be from {min} to {max}, not {value}"));
        }
    }
    // An adapter sends those of its base, which is known only once engines have told.
    let has_some = config
        .models
        .iter()
        .filter_map(|model| model.tokenizer.as_ref())
        .any(|it| it.from == super::From::Engine || !it.path.is_empty());
    for (place, model) in config.models.iter().enumerate() {
        if model.send_tokens == Some(true) && !has_some {
            let message = "there are none to send: no model has a tokenizer here";
            wrong(&format!("models[{place}].send_tokens"), message.to_owned());
        }
    }
}

fn check_credits(config: &Config, wrong: &mut Wrong<'_>) {
    let of_models = config
        .models
        .iter()
        .enumerate()
        .filter_map(|(place, model)| {
            let own = model.tier_credit?;
            Some((format!("models[{place}].tier_credit"), own))
        });
    let common = ("routing.tier_credit".to_owned(), config.routing.tier_credit);
    for (path, TierCredit { cpu, disk }) in std::iter::once(common).chain(of_models) {
        for (tier, value) in [("cpu", cpu), ("disk", disk)] {
            if !(0.0..=1.0).contains(&value) {
                wrong(
                    &format!("{path}.{tier}"),
                    format!("must be a number from 0 to 1, not {value}"),
                );
            }
        }
    }
}

fn check_tenants(config: &Config, wrong: &mut Wrong<'_>) {
    for (key, error) in tenant::check(&config.tenants) {
        wrong(&format!("tenants{key}"), error);
    }
}

fn check_carrier(config: &Config, wrong: &mut Wrong<'_>) {
    for (key, error) in config.responses.problems() {
        wrong(&format!("responses.{key}"), error);
    }
    let carrier = &config.responses.carrier;
    for (key, error) in carrier.check().err().unwrap_or_default() {
        wrong(&format!("responses.carrier.{key}"), error);
    }
    if config.replicas.0 == 0 {
        wrong("replicas", "must be at least 1".to_owned());
    }
    let store = &config.responses.store;
    for (key, error) in store.problems() {
        wrong(&format!("responses.store.{key}"), error);
    }
    let is_alone = store.kind == store::Kind::Memory;
    if config.replicas.0 > 1 && is_alone && config.responses.mode == Mode::Stateful {
        wrong(
            "responses.store.kind",
            "is memory, which each of several replicas has for itself, so that none would know the responses of \
             the others; keep them in Redis (`kind: redis`), or keep none (`mode: pass_through`)"
                .to_owned(),
        );
    }
    let is_shared = config.replicas.0 > 1 || store.kind == store::Kind::Redis;
    if carrier.keys.is_empty() && is_shared && config.responses.mode == Mode::Stateful {
        wrong(
            "responses.carrier.keys",
            "is empty, and each of several replicas would make its own key and refuse what the others \
             signed; give all of them the same (`openssl rand -hex 32` makes one)"
                .to_owned(),
        );
    }
}

/// Beyond this a time-out is a mistake, and clocks overflow.
const YEAR_MS: u64 = 365 * 24 * 3_600_000;

fn check_limits(config: &Config, wrong: &mut Wrong<'_>) {
    let at_least_one = [
        (
            "api.requests.body_bytes_max",
            config.api.requests.body_bytes_max,
        ),
        (
            "api.requests.body_timeout_ms",
            config.api.requests.body_timeout_ms,
        ),
        (
            "api.connections.connections_max",
            u64::from(config.api.connections.connections_max),
        ),
        (
            "api.connections.header_timeout_ms",
            config.api.connections.header_timeout_ms,
        ),
        (
            "api.connections.idle_timeout_ms",
            config.api.connections.idle_timeout_ms,
        ),
        (
            "api.connections.send_timeout_ms",
            config.api.connections.send_timeout_ms,
        ),
        (
            "api.connections.http2_streams_max",
            u64::from(config.api.connections.http2_streams_max),
        ),
        ("fleet.workers_max", u64::from(config.fleet.workers_max)),
        ("fleet.file.interval_ms", config.fleet.file.interval_ms),
        ("fleet.dns.interval_ms", config.fleet.dns.interval_ms),
        ("fleet.dns.port", u64::from(config.fleet.dns.port)),
        ("fleet.health.interval_ms", config.fleet.health.interval_ms),
        ("fleet.health.timeout_ms", config.fleet.health.timeout_ms),
        (
            "fleet.health.down_after",
            u64::from(config.fleet.health.down_after),
        ),
        (
            "fleet.health.up_after",
            u64::from(config.fleet.health.up_after),
        ),
        (
            "fleet.breaker.failures",
            u64::from(config.fleet.breaker.failures),
        ),
        ("fleet.breaker.open_ms", config.fleet.breaker.open_ms),
        (
            "fleet.connections.connect_timeout_ms",
            config.fleet.connections.connect_timeout_ms,
        ),
        ("routing.sampled", u64::from(config.routing.sampled)),
        (
            "predicted.tokens_per_worker",
            config.predicted.tokens_per_worker,
        ),
        ("predicted.blocks_max", config.predicted.blocks_max),
        ("relay.attempts_max", u64::from(config.relay.attempts_max)),
        (
            "relay.first_byte_timeout_ms",
            config.relay.first_byte_timeout_ms,
        ),
        ("relay.answer_timeout_ms", config.relay.answer_timeout_ms),
        (
            "relay.stream_idle_timeout_ms",
            config.relay.stream_idle_timeout_ms,
        ),
        ("relay.request_timeout_ms", config.relay.request_timeout_ms),
        (
            "prefill_decode.handoff_timeout_ms",
            config.prefill_decode.handoff_timeout_ms,
        ),
    ];
    let at_least_one = || {
        at_least_one
            .into_iter()
            .chain(events_at_least_one(&config.events))
    };
    for (path, value) in at_least_one() {
        if value == 0 {
            wrong(path, "must be at least 1".to_owned());
        }
    }
    let may_be_zero = [
        ("api.drain_timeout_ms", config.api.drain_timeout_ms),
        (
            "fleet.connections.pool_idle_timeout_ms",
            config.fleet.connections.pool_idle_timeout_ms,
        ),
        ("relay.backoff_ms", config.relay.backoff_ms),
        ("relay.backoff_max_ms", config.relay.backoff_max_ms),
        ("prefill_decode.lease_ms", config.prefill_decode.lease_ms),
        ("events.expected.grace_ms", config.events.expected.grace_ms),
    ];
    for (path, value) in at_least_one().chain(may_be_zero) {
        if path.ends_with("_ms") && value > YEAR_MS {
            wrong(path, format!("{value} ms is more than a year"));
        }
    }
    for (path, value, min) in bytes_at_least(&config.events) {
        if value < min {
            wrong(path, format!("must be at least {min} bytes, not {value}"));
        }
    }
    if config.relay.retry_budget_min_per_s > 1_000_000 {
        wrong(
            "relay.retry_budget_min_per_s",
            "must be up to 1000000".to_owned(),
        );
    }
    if !(16..=8_192).contains(&config.predicted.block_bytes) {
        let found = config.predicted.block_bytes;
        wrong(
            "predicted.block_bytes",
            format!("must be from 16 to 8192, not {found}"),
        );
    }
    for (place, status) in config.relay.retry_statuses.iter().enumerate() {
        if !(429..600).contains(status) {
            wrong(
                &format!("relay.retry_statuses[{place}]"),
                format!(
                    "{status} is an answer, not a reason to ask another worker; use 429 or 5xx"
                ),
            );
        }
    }
    if config.runtime.threads > 1_024 {
        wrong(
            "runtime.threads",
            format!("must be up to 1024, not {}", config.runtime.threads),
        );
    }
}

/// A zero here would make a loop without a pause, or follow nothing.
fn events_at_least_one(events: &Events) -> [(&'static str, u64); 19] {
    let Events {
        index: _,
        expected,
        parity,
        stream,
        zmq,
        grpc,
    } = events;
    [
        ("events.expected.marks_max", expected.marks_max),
        ("events.parity.grace_ms", parity.grace_ms),
        ("events.parity.raise_after", u64::from(parity.raise_after)),
        ("events.parity.clear_after", u64::from(parity.clear_after)),
        ("events.stream.silence_ms", stream.silence_ms),
        ("events.stream.replay_timeout_ms", stream.replay_timeout_ms),
        (
            "events.stream.held_batches_max",
            stream.held_batches_max as u64,
        ),
        ("events.stream.held_bytes_max", stream.held_bytes_max as u64),
        ("events.zmq.connect_timeout_ms", zmq.connect_timeout_ms),
        ("events.zmq.backoff_ms", zmq.backoff_ms),
        ("events.zmq.backoff_max_ms", zmq.backoff_max_ms),
        ("events.zmq.heartbeat_ms", zmq.heartbeat_ms),
        ("events.zmq.silence_max_ms", zmq.silence_max_ms),
        ("events.grpc.connect_timeout_ms", grpc.connect_timeout_ms),
        ("events.grpc.backoff_ms", grpc.backoff_ms),
        ("events.grpc.backoff_max_ms", grpc.backoff_max_ms),
        ("events.grpc.refused_backoff_ms", grpc.refused_backoff_ms),
        ("events.grpc.keepalive_ms", grpc.keepalive_ms),
        ("events.grpc.ping_ms", grpc.ping_ms),
    ]
}

/// Below this an index holds nothing worth asking for, and batches of a usual prompt are refused.
fn bytes_at_least(events: &Events) -> [(&'static str, u64, u64); 3] {
    const MEMORY_BYTES_MIN: u64 = 1 << 20;
    const MESSAGE_BYTES_MIN: u64 = 64 << 10;
    [
        (
            "events.index.memory_bytes_max",
            events.index.memory_bytes_max,
            MEMORY_BYTES_MIN,
        ),
        (
            "events.zmq.message_bytes_max",
            events.zmq.message_bytes_max as u64,
            MESSAGE_BYTES_MIN,
        ),
        (
            "events.grpc.message_bytes_max",
            events.grpc.message_bytes_max as u64,
            MESSAGE_BYTES_MIN,
        ),
    ]
}
