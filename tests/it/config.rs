//! `config.yaml` says what the code does, and a bad file is told all that is wrong with it.

use std::collections::BTreeSet;

use serde_json::Value;
use warmroute::config::document::{Document, Outside, to_yaml};
use warmroute::config::{Config, Tokenizer, parse_workers};
use warmroute::routing::Policy;

const DOCUMENTED: &str = include_str!("../../config.yaml");

fn minimal(rest: &str) -> String {
    format!("fleet: {{workers: [{{url: 'http://127.0.0.1:1'}}]}}\n{rest}")
}

/// The paths of every value, list items without their number.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                paths(value, &format!("{at}.{key}"), found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items
                .iter()
                .for_each(|item| paths(item, &format!("{at}[]"), found));
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

#[test]
fn the_documented_values_are_the_defaults() {
    let mut documented = Config::parse("config.yaml", DOCUMENTED).unwrap();
    assert_eq!(documented.fleet.workers.len(), 1);
    assert_eq!(documented.models.len(), 1);
    let common = documented.routing.clone();
    let model = documented.models.remove(0);
    assert_eq!(
        (
            model.policy,
            model.lambda,
            model.mu,
            model.tier_credit,
            model.holders,
            model.sampled,
            model.hash_on,
            model.ask_reports,
            model.bytes_per_token,
            model.tokenizer,
            model.send_tokens,
        ),
        (
            Some(common.policy),
            Some(common.lambda),
            Some(common.mu),
            Some(common.tier_credit),
            Some(common.holders),
            Some(common.sampled),
            Some(common.hash_on),
            Some(common.ask_reports),
            Some(documented.predicted.bytes_per_token),
            Some(Tokenizer::default()),
            Some(false),
        ),
    );
    documented.fleet.workers.clear();
    assert_eq!(documented.tenants.len(), 1);
    documented.tenants.clear();
    assert_eq!(documented, Config::default());
}

#[test]
fn every_setting_is_documented() {
    let outside = Outside {
        env: &|_| None,
        read_file: &|_| Ok(String::new()),
    };
    let documented: Value = Document::parse("config.yaml", DOCUMENTED.as_bytes(), outside)
        .read()
        .unwrap();
    let used = serde_json::to_value(Config::parse("config.yaml", DOCUMENTED).unwrap()).unwrap();
    let (mut in_file, mut in_code) = (BTreeSet::new(), BTreeSet::new());
    paths(&documented, "", &mut in_file);
    paths(&used, "", &mut in_code);
    assert_eq!(in_file, in_code);
    assert!(
        in_code.contains(".fleet.workers[].api_key")
            && in_code.contains(".models[].bytes_per_token")
    );
}

#[test]
fn what_check_prints_is_the_same_configuration() {
    let config = Config::parse("c", &minimal("models: [{name: m, policy: random}]")).unwrap();
    assert_eq!(
        Config::parse("c", &to_yaml(&config).unwrap()).unwrap(),
        config
    );
}

#[test]
fn a_model_has_its_own_weights_and_the_common_ones_else() {
    let text = minimal(
        "routing: {lambda: 4.0, policy: least_load}\nmodels: [{name: m, policy: cache_aware, mu: 0.1}]",
    );
    let models = Config::parse("c", &text).unwrap().model_settings();
    let own = &models.named["m"].routing;
    assert_eq!(
        (own.policy, own.lambda, own.mu),
        (Policy::CacheAware, 4.0, 0.1)
    );
    assert_eq!(models.common.routing.policy, Policy::LeastLoad);
}

#[test]
fn several_replicas_start_with_a_key() {
    let key = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
    let store = "{kind: redis, redis: {urls: ['redis://localhost']}}";
    let text = format!("replicas: 3\nresponses: {{store: {store}, carrier: {{keys: ['{key}']}}}}");
    let config = Config::parse("c", &minimal(&text)).unwrap();
    assert_eq!(config.replicas.0, 3);
    assert!(!to_yaml(&config).unwrap().contains(key));
}

#[test]
fn several_replicas_that_keep_no_responses_need_no_store_in_common() {
    let text = minimal("replicas: 2\nresponses: {mode: pass_through}");
    assert_eq!(Config::parse("c", &text).unwrap().replicas.0, 2);
}

fn check(text: &str, expected: &[&str]) {
    let problems = Config::parse("c.yaml", text).unwrap_err().to_string();
    let lines: Vec<&str> = problems.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{text}\n{problems}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(
            line.contains(expected),
            "{text}\n{line}\n  lacks {expected}"
        );
    }
}

#[test]
fn a_tokenizer_that_cannot_be_loaded_is_told_with_path_and_line() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let one = |tokenizer: &str| minimal(&format!("models:\n- name: m\n  tokenizer: {tokenizer}"));
    check(
        &one("{path: /no/such/folder}"),
        &[
            "c.yaml:4:21: models[0].tokenizer.path: /no/such/folder: no such folder; give the model's own",
        ],
    );
    check(
        &one(&format!(
            "{{path: '{fixtures}/kv', chat_template: /no/such.jinja}}"
        )),
        &[
            "models[0].tokenizer.path: ",
            "models[0].tokenizer.chat_template: /no/such.jinja: no such file; give the one that",
        ],
    );
    check(&one("{from: hub}"), &["models[0].tokenizer.from"]);
    check(
        &one("{from: engine, path: /x}"),
        &["models[0].tokenizer.path: is not used where the engine is asked"],
    );
    check(
        &one("{path: '', content_format: parts}"),
        &["models[0].tokenizer.content_format"],
    );
    check(
        &minimal("models: [{name: m, send_tokens: true}]"),
        &["models[0].send_tokens: there are none to send"],
    );
    check(
        &minimal("tokens: {pool: {threads: 0}, engine: {timeout_ms: 0}}"),
        &[
            "tokens.pool.threads: must be from 1 to 256, not 0",
            "tokens.engine.timeout_ms: must be from 1",
        ],
    );
}

#[test]
fn template_arguments_of_any_kind_are_read() {
    let text = minimal(
        "models: [{name: m, tokenizer: {from: engine, chat_template_kwargs: {}}}, \
         {name: n, tokenizer: {chat_template_kwargs: {enable_thinking: false, depth: 3, of: [a]}}}]",
    );
    let config = Config::parse("c", &text).unwrap();
    let kwargs = &config.models[1]
        .tokenizer
        .as_ref()
        .unwrap()
        .chat_template_kwargs;
    assert_eq!(
        serde_json::to_value(kwargs).unwrap(),
        serde_json::json!({"enable_thinking": false, "depth": 3, "of": ["a"]})
    );
    assert_eq!(
        Config::parse("c", &to_yaml(&config).unwrap()).unwrap(),
        config
    );
}

#[test]
fn each_mistake_has_its_message_with_path_and_line() {
    check("", &["fleet: has no workers"]);
    check("api: [", &["c.yaml:1:"]);
    check(
        &minimal("polcy: 1"),
        &["c.yaml:2:1: polcy: unknown key `polcy`"],
    );
    check(
        &minimal("routing:\n  polcy: random"),
        &["c.yaml:3:3: routing.polcy: unknown key `polcy`; did you mean `policy`?"],
    );
    check(&minimal("routing: {policy: warmest}"), &["routing.policy"]);
    check(
        &minimal("api: {listen: 8080}"),
        &["c.yaml:2:15: api.listen"],
    );
    check(
        &minimal("api: {listen: localhost}"),
        &["api.listen: `localhost` is not an address and port"],
    );
    check(
        &minimal("api: {listen: '127.0.0.1:9090'}\nadmin: {listen: '127.0.0.1:9090'}"),
        &["admin.listen: is the API's address"],
    );
    check(
        &minimal("responses: {store: {kind: disk}}"),
        &["responses.store.kind"],
    );
    check(
        &minimal("responses: {store: {kind: redis}}"),
        &[
            "responses.carrier.keys: is empty",
            "responses.store.redis.urls: list at least one redis:// address",
        ],
    );
    check(
        &minimal(
            "responses:\n  store:\n    kind: redis\n    lease: {beat_ms: 9000}\n    memory: {records_max: 1}\n    redis:\n      \
             mode: cluster\n      urls: ['redis://a:1', 'rediss://b', 'redis://u:secret@c:1', d]\n      master: m\n      \
             database: 2\n      username: u\n      prefix: '{x}'\n      read_timeout_ms: 0\n      tls: {key_file: k}",
        ),
        &[
            "responses.carrier.keys: is empty",
            "responses.store.lease.beat_ms: must be at most half",
            "responses.store.memory.records_max: must be at least 2",
            "responses.store.redis.urls: must be all redis:// or all rediss://",
            "responses.store.redis.urls[2]: must have no user or password in it",
            "responses.store.redis.urls[3]: must look like redis://host:6379",
            "responses.store.redis.master: is for mode sentinel alone",
            "responses.store.redis.database: a cluster has only database 0",
            "responses.store.redis.username: is given without a password",
            "responses.store.redis.prefix: must be up to 64 characters without braces",
            "responses.store.redis.read_timeout_ms: must be at least 1",
            "responses.store.redis.tls: certificate_file and key_file go together",
        ],
    );
    check(
        &minimal("relay: {attempts_max: 0}"),
        &["relay.attempts_max: must be at least 1"],
    );
    check(
        &minimal("relay: {request_timeout_ms: 99999999999999}"),
        &["relay.request_timeout_ms: 99999999999999 ms is more than a year"],
    );
    check(
        &minimal("relay: {attempts_max: -1}"),
        &["relay.attempts_max"],
    );
    check(
        &minimal("relay: {retry_statuses: [503, 404]}"),
        &["relay.retry_statuses[1]: 404 is an answer"],
    );
    check(
        &minimal("routing: {lambda: -1.0}"),
        &["routing.lambda: must be a number of at least 0"],
    );
    check(
        &minimal("routing: {hash_on: [tenant]}"),
        &["routing.hash_on[0]: `tenant` is none of"],
    );
    check(
        &minimal("predicted: {block_bytes: 8}"),
        &["predicted.block_bytes: must be from 16 to 8192"],
    );
    check(
        &minimal("models: [{name: m}, {name: m}]"),
        &["models[1].name: `m` is listed twice"],
    );
    check(&minimal("models: [{policy: random}]"), &["missing"]);
    check(&minimal("log: {level: 'a=b=c'}"), &["log.level"]);
    check(&minimal("replicas: 0"), &["replicas: must be at least 1"]);
    check(
        &minimal("tenants: [{name: a, keys: [x]}, {name: a, keys: [x, '']}]"),
        &[
            "c.yaml:2:40: tenants[1].name: `a` is tenants[0] already",
            "c.yaml:2:50: tenants[1].keys[0]: is a key of tenants[0] already",
            "c.yaml:2:53: tenants[1].keys[1]: is empty",
        ],
    );
    check(
        &minimal("replicas: 2\nresponses:\n  carrier: {bytes_max: 1}"),
        &[
            "responses.store.kind: is memory, which each of several replicas has for itself",
            "responses.carrier.keys: is empty, and each of several replicas",
            "c.yaml:4:24: responses.carrier.bytes_max: must be from 4096 to 1073741824, not 1",
        ],
    );
    check(
        &minimal(
            "responses:\n  carrier:\n    keys:\n      - hunter2hunter2\n      - '${WARMROUTE_NO_SUCH}'",
        ),
        &[
            "c.yaml:5:9: responses.carrier.keys[0]: ",
            "WARMROUTE_NO_SUCH",
        ],
    );
    check(
        "fleet: {workers: [{url: '127.0.0.1:1'}]}",
        &["fleet.workers[0].url: `127.0.0.1:1`"],
    );
    check(
        "fleet: {workers: [{url: 'https://a'}]}",
        &["workers are reached over http"],
    );
    check(
        "fleet: {workers: [{url: 'http://a:1'}, {url: 'http://a:1/'}]}",
        &["fleet.workers[1].url: `a:1` is fleet.workers[0] already"],
    );
    check(
        "fleet: {workers: [{url: 'http://a:1', api_key: '${WARMROUTE_NO_SUCH}'}]}",
        &["WARMROUTE_NO_SUCH"],
    );
    check(
        "fleet: {workers: [{url: 'http://a:1', api_key: 'file:/no/such/key'}]}",
        &["/no/such/key"],
    );
    check(
        "fleet: {dns: {name: 'http://a'}}",
        &["fleet.dns.name: `http://a` must be a name alone"],
    );
}

#[test]
fn settings_of_events_that_make_loops_or_overflow_are_refused() {
    let part = |part: &str, key: &str, value: u64| {
        minimal(&format!("events: {{{part}: {{{key}: {value}}}}}"))
    };
    let parts: [(&str, &[&str]); 4] = [
        ("expected", &["marks_max"]),
        (
            "stream",
            &[
                "silence_ms",
                "replay_timeout_ms",
                "held_batches_max",
                "held_bytes_max",
            ],
        ),
        (
            "zmq",
            &[
                "connect_timeout_ms",
                "backoff_ms",
                "backoff_max_ms",
                "heartbeat_ms",
                "silence_max_ms",
            ],
        ),
        (
            "grpc",
            &[
                "connect_timeout_ms",
                "backoff_ms",
                "backoff_max_ms",
                "refused_backoff_ms",
                "keepalive_ms",
                "ping_ms",
            ],
        ),
    ];
    for (name, keys) in parts {
        for key in keys {
            let path = format!("events.{name}.{key}: ");
            let problem = format!("{path}must be at least 1");
            check(&part(name, key, 0), &[&problem]);
            if key.ends_with("_ms") {
                let year_ms = 365 * 24 * 3_600_000;
                assert!(Config::parse("c", &part(name, key, year_ms)).is_ok());
                let problem = format!("{path}31536000001 ms is more than a year");
                check(&part(name, key, year_ms + 1), &[&problem]);
            }
        }
    }
    check(
        &minimal("events: {expected: {grace_ms: 18446744073709551615}}"),
        &["events.expected.grace_ms: 18446744073709551615 ms is more than a year"],
    );
    check(
        &minimal(
            "events: {index: {memory_bytes_max: 1048575}, zmq: {message_bytes_max: 0}, grpc: {message_bytes_max: 65535}}",
        ),
        &[
            "events.index.memory_bytes_max: must be at least 1048576 bytes, not 1048575",
            "events.zmq.message_bytes_max: must be at least 65536 bytes, not 0",
            "events.grpc.message_bytes_max: must be at least 65536 bytes, not 65535",
        ],
    );
}

#[test]
fn all_mistakes_are_told_at_once_in_the_order_of_the_file() {
    check(
        "fleet:\n  workers:\n    - url: ftp://a\n    - {url: 'http://b:1', rolle: prefill}\nrouting:\n  lambda: many\nrelay:\n  attempts_max: 0\n",
        &[
            "c.yaml:3:12: fleet.workers[0].url",
            "c.yaml:4:27: fleet.workers[1].rolle",
            "c.yaml:6:11: routing.lambda",
            "c.yaml:8:17: relay.attempts_max",
        ],
    );
}

#[test]
fn a_workers_file_is_read_like_the_configuration() {
    assert!(
        parse_workers("w.yaml", "", false)
            .unwrap_err()
            .contains("has no `workers:`")
    );
    assert!(
        parse_workers("w.yaml", "workers: []", false)
            .unwrap()
            .is_empty()
    );
    let members =
        parse_workers("w.yaml", "workers: [{url: 'http://a:1', name: x}]", false).unwrap();
    assert_eq!(
        (members[0].name.as_str(), members[0].address.as_str()),
        ("x", "a:1")
    );
    let error = parse_workers(
        "w.yaml",
        "workers:\n- url: a\n- {url: 'http://b', nam: y}\n",
        false,
    )
    .unwrap_err();
    assert!(
        error.contains("w.yaml:2:8: workers[0].url") && error.contains("w.yaml:3:"),
        "{error}"
    );
}

#[test]
fn a_role_needs_a_connector_and_is_told_how_to_write_one() {
    let text = |rest: &str| {
        format!(
            "fleet: {{workers: [{{url: 'http://a:1', role: prefill}}, {{url: 'http://b:1', role: decode}}]}}\n{rest}"
        )
    };
    let problems = Config::parse("c", &text("")).unwrap_err().to_string();
    for (place, role) in [(0, "prefill"), (1, "decode")] {
        let path = format!("fleet.workers[{place}].role");
        assert!(problems.contains(&path), "{problems}");
        let told = format!("`{role}` needs a connector");
        assert!(problems.contains(&told), "{problems}");
    }
    assert!(
        problems.contains("prefill_decode: {connector: nixl}"),
        "{problems}"
    );
    for connector in ["nixl", "mooncake"] {
        let on = text(&format!("prefill_decode: {{connector: {connector}}}"));
        assert!(Config::parse("c", &on).is_ok());
    }
    // Those that a file lists.
    let listed = "workers: [{url: 'http://a:1', role: decode}]";
    let error = parse_workers("w.yaml", listed, false).unwrap_err();
    assert!(error.contains("workers[0].role"), "{error}");
    assert_eq!(parse_workers("w.yaml", listed, true).unwrap().len(), 1);
    let wrong = Config::parse(
        "c",
        &minimal("prefill_decode: {connector: nxil, handoff_timeout_ms: 0, bootstrap_port: 0}"),
    );
    assert!(wrong.unwrap_err().to_string().contains("nixl"));
    let wrong = Config::parse(
        "c",
        &minimal("prefill_decode: {handoff_timeout_ms: 0, bootstrap_port: 0}"),
    );
    let problems = wrong.unwrap_err().to_string();
    assert!(
        problems.contains("handoff_timeout_ms") && problems.contains("bootstrap_port"),
        "{problems}"
    );
}

fn split_by(fleet: &str, rest: &str) -> Result<Config, String> {
    let text = format!("fleet: {fleet}\nprefill_decode: {{connector: nixl{rest}}}\n");
    Config::parse("c", &text).map_err(|problems| problems.to_string())
}

#[test]
fn beside_prefill_workers_with_a_dns_name_the_others_are_decode_workers() {
    let both = "{dns: {name: all, prefill_name: p}}";
    let problems = split_by(both, "").unwrap_err();
    assert!(problems.contains("fleet.dns.role"), "{problems}");
    assert!(problems.contains("write `role: decode`"), "{problems}");
    for fine in [
        "{dns: {name: all, prefill_name: p, role: decode}}",
        "{dns: {name: all}}",
        "{dns: {prefill_name: p}}",
    ] {
        assert_eq!(split_by(fine, "").err(), None, "{fine}");
    }
}

#[test]
fn a_topology_that_no_worker_has_as_a_label_is_a_problem() {
    let zone = ", topology: zone";
    let worker = |labels: &str| format!("{{url: 'http://a:1', labels: {{{labels}}}}}");
    let listed = |labels: &str| format!("{{workers: [{}]}}", worker(labels));
    let problems = split_by(&listed("zoen: a"), zone).unwrap_err();
    assert!(
        problems.contains("prefill_decode.topology: no worker has the label `zone`"),
        "{problems}"
    );
    let file = "{file: {path: workers.yaml}}";
    let dns = "{dns: {name: all, labels: {zone: a}}}";
    for fine in [&*listed("zone: a"), file, dns] {
        assert_eq!(split_by(fine, zone).err(), None, "{fine}");
    }
    assert_eq!(split_by(&listed(""), "").err(), None);
}

#[test]
fn a_stream_is_kept_alive_every_second_at_most() {
    let problems = |ms: u64| {
        let config = minimal(&format!("responses: {{keep_alive_ms: {ms}}}"));
        Config::parse("c", &config).err().map(|it| it.to_string())
    };
    for fine in [0, 1_000, 15_000] {
        assert_eq!(problems(fine), None);
    }
    for wrong in [1, 999] {
        let told = problems(wrong).unwrap();
        assert!(told.contains("responses.keep_alive_ms"), "{told}");
        assert!(told.contains("0 to say nothing"), "{told}");
    }
}
