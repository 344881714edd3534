//! What a configuration file may say, and what is reported of a bad one.

use std::path::Path;
use std::time::Duration;

use warmroute::config::reader::to_yaml;
use warmroute::config::{Config, parse_workers, reference};
use warmroute::fleet::Member;
use warmroute::fleet::discovery::WorkerDefaults;
use warmroute::routing::Policy;

fn minimal(rest: &str) -> String {
    format!("workers: ['http://127.0.0.1:1']\n{rest}")
}

#[test]
fn the_reference_is_that_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let written = std::fs::read_to_string(path).unwrap();
    let is_same = written == reference::markdown();
    assert!(
        is_same,
        "make it anew: warmroute config reference > docs/configuration.md"
    );
}

/// The paths of all keys that a value has, without those of lists.
fn keys(value: &serde_json::Value, path: &str, found: &mut Vec<String>) {
    let Some(map) = value.as_object() else { return };
    for (key, value) in map {
        let path = match path {
            "" => key.clone(),
            path => format!("{path}.{key}"),
        };
        if value.is_object() {
            keys(value, &path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn the_reference_and_the_schema_have_every_key_with_a_description() {
    let (reference, schema) = (reference::markdown(), reference::schema());
    let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
    let default = serde_json::to_value(Config::default()).unwrap();
    let mut all = Vec::new();
    keys(&default, "", &mut all);
    assert!(all.len() > 100, "{}", all.len());
    for path in all {
        let row = format!("| `{path}` |");
        let described = reference.lines().find(|line| line.starts_with(&row));
        let is_part = reference.contains(&format!("## `{path}`"));
        assert!(described.is_some() || is_part, "{path}");
        assert!(
            described.is_none_or(|line| !line.ends_with("|  |")),
            "{path}"
        );
        let mut schema = &schema;
        for key in path.split('.') {
            let of_forms = schema["anyOf"].as_array().into_iter().flatten();
            let mut forms = std::iter::once(schema).chain(of_forms);
            let has_it = forms.find(|form| !form["properties"][key].is_null());
            schema = &has_it.unwrap_or_else(|| panic!("{path}: {schema}"))["properties"][key];
        }
    }
}

#[test]
fn no_key_has_a_unit_in_its_name() {
    let mut all = Vec::new();
    keys(
        &serde_json::to_value(Config::default()).unwrap(),
        "",
        &mut all,
    );
    for path in all {
        let has_unit = ["_ms", "_s", "_bytes", "_max", "_limit"]
            .iter()
            .any(|end| path.ends_with(end));
        assert!(!has_unit, "{path}");
    }
}

#[test]
fn the_files_that_users_start_from_are_good() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("config.yaml")).unwrap();
    assert!((40..=64).contains(&text.lines().count()));
    let config = Config::parse("config.yaml", &text).unwrap();
    assert_eq!(config.workers.len(), 2);
    // With what is commented out, too.
    let whole: String = text
        .lines()
        .map(|line| match line.split_once("# ") {
            Some((indent, rest)) if indent.trim().is_empty() && is_yaml(rest) => {
                format!("{indent}{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    let whole = whole.replace("${", "${X_");
    let problems = Config::parse("config.yaml", &whole).err();
    let problems = problems
        .map(|problems| problems.to_string())
        .unwrap_or_default();
    // Variables and files that are not there are all that is wrong.
    for problem in problems.lines() {
        let expected = ["is not set", "tokenizer", "cannot be read"];
        let is_expected = expected.iter().any(|part| problem.contains(part));
        assert!(is_expected, "{problem}");
    }
}

/// Whether a comment is a setting that is commented out.
fn is_yaml(comment: &str) -> bool {
    let comment = comment.trim_start().trim_start_matches("- ");
    let key = comment.split(':').next().unwrap_or_default();
    let is_key = |letter: char| letter.is_ascii_lowercase() || letter == '_';
    comment.contains(':') && !key.is_empty() && key.chars().all(is_key) && !comment.contains(';')
}

#[test]
fn what_check_prints_is_the_same_configuration() {
    let text = minimal(
        "models: [{name: m, policy: random, tokenizer: {from: engine}}]\n\
         discovery: [{file: {path: w.yaml, labels: {a: $$x}}}, {dns: {name: n, api_key: k}}, {static: {workers: ['http://b:1']}}]\n\
         responses: {store: {redis: 'redis://a:1'}, state_token: {keys: [e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff]}}",
    );
    let config = Config::parse("c", &text).unwrap();
    let printed = to_yaml(&config).unwrap();
    let again = printed.replacen(
        "***",
        "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        2,
    );
    let again = Config::parse("c", &again).unwrap();
    assert_eq!(to_yaml(&again).unwrap(), printed);
}

#[test]
fn short_forms_mean_what_long_ones_do() {
    let same = |short: &str, long: &str| {
        let parse = |text| Config::parse("c", text).unwrap();
        assert_eq!(parse(&minimal(short)), parse(&minimal(long)), "{short}");
    };
    same("", "workers_file: 1".trim_start_matches("workers_file: 1"));
    same(
        "responses: {store: memory}",
        "responses: {store: {memory: {}}}",
    );
    let key =
        "state_token: {keys: [e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff]}";
    same(
        &format!("responses: {{store: {{redis: 'redis://a:1'}}, {key}}}"),
        &format!("responses: {{store: {{redis: {{urls: ['redis://a:1']}}}}, {key}}}"),
    );
    let short = Config::parse("c", "workers: ['http://a:1']").unwrap();
    let long = Config::parse("c", "workers: [{url: 'http://a:1'}]").unwrap();
    assert_eq!(short, long);
    let entry = Config::parse("c", "discovery: [{static: {workers: ['http://a:1']}}]").unwrap();
    assert_eq!(entry.members(), short.members());
}

#[test]
fn a_discovery_entry_says_what_its_workers_have_in_common() {
    let text = "prefill_decode: {connector: nixl}\ndiscovery:\n\
        - static: {workers: ['http://a:1', {url: 'http://b:1', role: decode, labels: {rack: r}}], role: prefill, labels: {zone: x}, api_key: k}\n\
        - dns: {name: one}\n- dns: {name: two, port: 9000, role: decode}\n";
    let config = Config::parse("c", text).unwrap();
    let members = config.members();
    let roles: Vec<String> = members
        .iter()
        .map(|member| member.role.to_string())
        .collect();
    assert_eq!(roles, ["prefill", "decode"]);
    let has = |member: &Member, label| member.labels.contains_key(label);
    assert!(has(&members[0], "zone") && has(&members[1], "zone") && has(&members[1], "rack"));
    assert!(members.iter().all(|member| member.authorization.is_some()));
    assert_eq!(config.discovery.len(), 3);
}

#[test]
fn durations_and_sizes_have_units() {
    let text = minimal("api: {drain_timeout: 1m 30s, max_body: 2MB}");
    let config = Config::parse("c", &text).unwrap();
    assert_eq!(config.api.drain_timeout, Duration::from_secs(90));
    assert_eq!(config.api.requests.max_body, 2_000_000);
    check(
        &minimal("api: {drain_timeout: 30, max_body: 1000}"),
        &[
            "c.yaml:2:22: api.drain_timeout: expected a duration such as `30s`, found `30`",
            "api.max_body: expected a size such as `64MiB`, found `1000`",
        ],
    );
}

#[test]
fn an_error_shows_no_rust_type_and_no_secret() {
    let wrong = [
        "api: 7",
        "api: {drain_timeout: [1]}",
        "predicted: {bytes_per_token: much}",
        "requests: {max_attempts: -1}",
        "requests: {max_attempts: 3.5}",
        "requests: {max_attempts: 99999999999}",
        "responses: {store: disk}",
        "responses: {advanced: {ready_without_store: perhaps}}",
        "discovery: [{consul: {}}]",
        "discovery: [{dns: {}}]",
        "discovery: {dns: {name: a}}",
        "models: [{name: m, tokenizer: [a]}]",
        "tenants: [{name: a, keys: hunter2}]",
        "tenants: [{name: a, keys: [[hunter2]]}]",
        "prefill_decode: {connector: nxil}",
    ];
    for text in wrong {
        let problems = Config::parse("c", &minimal(text)).unwrap_err().to_string();
        for word in [
            "u32", "u64", "i64", "f64", "struct", "enum", "variant", "visitor", "untagged",
            "hunter2",
        ] {
            assert!(!problems.contains(word), "{text}: {problems}");
        }
        let has_position = problems.lines().all(|line| line.starts_with("c:2:"));
        assert!(
            has_position && problems.contains(": "),
            "{text}: {problems}"
        );
    }
}

#[test]
fn a_model_has_its_own_routing_and_the_common_one_else() {
    let text = minimal(
        "routing: {policy: least_load, hash_on: [user], advanced: {tier_credit: {cpu: 0.25}}}\nmodels: [{name: m, policy: cache_aware}]",
    );
    let models = Config::parse("c", &text).unwrap().model_settings();
    let own = &models.named["m"].routing;
    assert_eq!(
        (own.policy, &*own.hash_on, own.advanced.tier_credit.cpu),
        (Policy::CacheAware, &["user".to_owned()][..], 0.25)
    );
    assert_eq!(models.common.routing.policy, Policy::LeastLoad);
}

/// A replica that may have others beside it.
const REPLICAS: &str = "peers: {listen: 'localhost:9701'}";

#[test]
fn several_replicas_start_with_a_key() {
    let key = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff";
    let store = "{redis: 'redis://localhost'}";
    let text =
        format!("{REPLICAS}\nresponses: {{store: {store}, state_token: {{keys: ['{key}']}}}}");
    let config = Config::parse("c", &minimal(&text)).unwrap();
    assert!(config.peers.is_on());
    assert!(!to_yaml(&config).unwrap().contains(key));
}

#[test]
fn several_replicas_that_keep_no_responses_need_no_store_in_common() {
    let text = minimal(&format!("{REPLICAS}\nresponses: {{mode: pass_through}}"));
    assert!(Config::parse("c", &text).unwrap().peers.is_on());
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
            "c.yaml:4:21: models[0].tokenizer.path: /no/such/folder: folder not found; give the model folder",
        ],
    );
    check(
        &one(&format!(
            "{{path: '{fixtures}/kv', chat_template: /no/such.jinja}}"
        )),
        &[
            "models[0].tokenizer.path: ",
            "models[0].tokenizer.chat_template: /no/such.jinja: file not found; give the file that",
        ],
    );
    check(&one("{from: hub}"), &["models[0].tokenizer.from"]);
    check(
        &one("{from: engine, path: /x}"),
        &["models[0].tokenizer.path: is not used where the engine is asked"],
    );
    for unused in [
        "content_format: openai",
        "exclude_tools_when_tool_choice_none: true",
        "reasoning_effort_map: {xhigh: high}",
    ] {
        check(
            &one(&format!("{{from: engine, {unused}}}")),
            &["is not used where the engine is asked"],
        );
    }
    check(
        &one("{path: '', content_format: parts}"),
        &["models[0].tokenizer.content_format"],
    );
    check(
        &minimal("models: [{name: m, send_token_ids: true}]"),
        &["models[0].send_token_ids: there are none to send"],
    );
    check(
        &minimal("tokenization: {advanced: {pool: {threads: 0}, engine: {timeout: 0s}}}"),
        &[
            "tokenization.advanced.pool.threads: must be from 1 to 256, not `0`",
            "tokenization.advanced.engine.timeout: must be more than 0, not `0s`",
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
fn mistakes_of_a_new_user_are_found_with_what_to_write() {
    let folder = crate::reload::Folder::new();
    let log = folder.path("usage.jsonl");
    let place = |path: &std::path::Path| minimal(&format!("usage: {{log: '{}'}}", path.display()));
    let is_folder = format!(
        "is a folder; write the path of a file, such as `{}`",
        log.display()
    );
    check(&place(&folder.path("")), &[&is_folder]);
    assert!(Config::parse("c", &place(&log)).is_ok());
    // The check leaves no file.
    assert!(!log.exists() && std::fs::read_dir(folder.path("")).unwrap().next().is_none());
    check(
        &minimal("usage: {log: /proc/usage.jsonl}"),
        &["c.yaml:2:14: usage.log: cannot be written: "],
    );
    check(
        &minimal("tenants: [{name: a, keys: [sixteen-letters-1], priority: 5, max_priority: 2}]"),
        &["c.yaml:2:58: tenants[0].priority: is 5, above the tenant's `max_priority` of 2"],
    );
    check(
        &minimal("tenants: [{name: other, keys: [sixteen-letters-1]}]"),
        &["c.yaml:2:18: tenants[0].name: `other` is what metrics call"],
    );
    for key in [
        "tenants: [{name: a, keys: [sixteen-letters-1], priority: 99999999999}]",
        "queue: {objectives: {a: 99999999999}}",
    ] {
        check(
            &minimal(key),
            &["must be from -2147483648 to 2147483647, not `99999999999`"],
        );
    }
    check(
        &minimal("models: [{name: m, alias: [a]}]"),
        &["c.yaml:2:20: models[0].alias: unknown key `alias`; did you mean `aliases`?"],
    );
}

#[test]
fn a_class_may_have_no_target_and_leave_its_own_bounds_without_a_value() {
    let text = minimal(
        "queue:\n  ttft_target: 2s\n  classes:\n  \
         - {name: high, priority: 1, ttft_target: 0s, max_wait: null}\n  \
         - {name: low, priority: 0, ttft_target: null}\n",
    );
    let config = Config::parse("c.yaml", &text).unwrap();
    let [high, low] = &*config.queue.settings().unwrap().classes else {
        panic!("{config:?}");
    };
    assert_eq!(high.ttft_target, Some(Duration::ZERO));
    assert_eq!((high.max_wait, low.ttft_target), (None, None));
    assert_eq!(
        Config::parse("c.yaml", &to_yaml(&config).unwrap()).unwrap(),
        config
    );
    check(
        &minimal("queue: {classes: [{name: a, priority: 0, max_wait: 0s}]}"),
        &["queue.classes[0].max_wait: must be more than 0, not `0s`"],
    );
}

#[test]
fn a_log_has_room_for_some_lines() {
    check(
        &minimal("log: {access_file_max_size: 4095B}\nusage: {max_queued_size: 1KiB}"),
        &[
            "c.yaml:2:29: log.access_file_max_size: must be at least 4KiB, not `4095B`",
            "c.yaml:3:26: usage.max_queued_size: must be at least 4KiB, not `1KiB`",
        ],
    );
    let least = minimal("log: {access_file_max_size: 4KiB}\nusage: {max_queued_size: 4KiB}");
    Config::parse("c.yaml", &least).unwrap();
}

#[cfg(feature = "jwt")]
#[test]
fn mistakes_in_the_settings_of_tokens_are_found() {
    let with = |rest: &str| minimal(&format!("tenants: [{{name: a}}]\njwt: {rest}"));
    check(&with("{issuers: []}"), &["jwt.issuers: lists none"]);
    check(
        &with("{issuers: [{issuer: i}]}"),
        &[
            "issuers[0].audiences: is missing",
            "issuers[0].jwks: is missing: write a URL",
        ],
    );
    let one = |more: &str| {
        with(&format!(
            "{{issuers: [{{issuer: i, audiences: [a], jwks: 'https://a/b'{more}}}]}}"
        ))
    };
    assert!(Config::parse("c", &one("")).is_ok());
    check(
        &one(", algorithms: [HS256]"),
        &["jwt.issuers[0].algorithms[0]: expected one of `RS256`"],
    );
    check(
        &one(", algorithms: [none]"),
        &["jwt.issuers[0].algorithms[0]: expected one of `RS256`"],
    );
    check(
        &with("{issuers: [{issuer: i, audiences: [a], jwks: /no/such/file}]}"),
        &["c.yaml:3:51: jwt.issuers[0].jwks: cannot read `/no/such/file`"],
    );
    check(
        &with("{issuers: [{issuer: i, audiences: [a], jwks: 'https://a/b'}], default_tenant: b}"),
        &["jwt.default_tenant: `b` is none of `tenants`"],
    );
    check(
        &minimal("jwt: {issuers: [{issuer: i, audiences: [a], jwks: 'https://a/b'}]}"),
        &["jwt: needs `tenants`"],
    );
}

#[test]
fn each_mistake_has_its_message_with_path_and_line() {
    check("", &["workers: there are no workers"]);
    check("worker: [http://a:1]", &["did you mean `workers`?"]);
    check("discover: []", &["did you mean `discovery`?"]);
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
        &["c.yaml:2:15: api.listen: `8080` is not an address and port"],
    );
    check(
        &minimal("api: {listen: localhost}"),
        &["api.listen: `localhost` is not an address and port"],
    );
    check(
        &minimal("api: {listen: '127.0.0.1:9090'}\nadmin: {listen: '127.0.0.1:9090'}"),
        &["admin.listen: has the port of `api.listen` (`127.0.0.1:9090`)"],
    );
    // All addresses of a host have its loopback address among them.
    check(
        &minimal("api: {listen: ':9090'}\nadmin: {listen: '127.0.0.1:9090'}"),
        &["c.yaml:3:17: admin.listen: has the port of `api.listen` (`:9090`)"],
    );
    check(
        &minimal(
            "responses: {mode: pass_through}\nendpoint_picker: {listen: '127.0.0.1:9701'}\npeers: {listen: '127.0.0.1:9701', secret: sixteen-bytes-at-least}",
        ),
        &["c.yaml:3:27: endpoint_picker.listen: has the port of `peers.listen` (`127.0.0.1:9701`)"],
    );
    check(
        &minimal("admin: {listen: ':9090'}"),
        &["c.yaml:2:17: admin.listen: `:9090` can be reached from other hosts"],
    );
    check(
        &minimal("admin: {listen: ':9090', token: short}"),
        &["admin.token: must have at least 16 characters"],
    );
    check(
        &minimal(
            "admin:\n  tokens: {read: [0123456789abcdef, short], operate: [0123456789abcdef]}",
        ),
        &[
            "c.yaml:3:37: admin.tokens.read[1]: must have at least 16 characters",
            "admin.tokens.operate[0]: is `admin.tokens.read[0]` already",
        ],
    );
    check(
        &minimal("tenant_salt_key: short"),
        &["tenant_salt_key: must have at least 16 characters"],
    );
    check(
        &minimal("responses: {store: disk}"),
        &["responses.store: expected `memory` or a map of keys and values, found `disk`"],
    );
    check(
        &minimal("responses: {store: {redis: {}}}"),
        &[
            "responses.state_token.keys: with `responses.store.redis` a key is needed",
            "responses.store.redis.urls: list at least one redis:// address",
        ],
    );
    check(
        &minimal(
            "responses:\n  store:\n    lease: {duration: 9ms}\n    redis:\n      \
             mode: cluster\n      urls: ['redis://a:1', 'rediss://b', 'redis://u:secret@c:1', d]\n      master: m\n      \
             database: 2\n      username: u\n      prefix: '{x}'\n      tls: {key_file: k}",
        ),
        &[
            "responses.state_token.keys: with `responses.store.redis` a key is needed",
            "responses.store.lease.duration: must be at least 1s",
            "responses.store.redis.urls: must be all redis:// or all rediss://",
            "responses.store.redis.urls[2]: must have no user or password in it",
            "responses.store.redis.urls[3]: must look like redis://host:6379",
            "responses.store.redis.master: is for mode sentinel alone",
            "responses.store.redis.database: a cluster has only database 0",
            "responses.store.redis.username: is given without a password",
            "responses.store.redis.prefix: must be up to 64 characters without braces",
            "responses.store.redis.tls: certificate_file and key_file go together",
        ],
    );
    check(
        &minimal(
            "responses: {store: {redis: {urls: ['redis://a'], advanced: {read_timeout: 0s, write_timeout: 2h}}, memory: {max_records: 1}}, state_token: {keys: [a]}}",
        ),
        &[
            "responses.store.redis.advanced.read_timeout: must be more than 0",
            "responses.store.redis.advanced.write_timeout: must be at most 1h",
            "responses.store.memory.max_records: must be at least 2",
            "responses.state_token.keys[0]: ",
        ],
    );
    check(
        &minimal("requests: {max_attempts: 0}"),
        &["requests.max_attempts: must be"],
    );
    check(
        &minimal("requests: {request_timeout: 366d}"),
        &["requests.request_timeout: must be at most 365d, not `366d`"],
    );
    check(
        &minimal("requests: {max_attempts: -1}"),
        &["requests.max_attempts"],
    );
    check(
        &minimal("requests: {advanced: {retry_statuses: [503, 404]}}"),
        &["requests.advanced.retry_statuses[1]: 404 is an answer"],
    );
    check(
        &minimal("routing: {advanced: {tier_credit: {cpu: -0.5}}}"),
        &["routing.advanced.tier_credit.cpu: must be from 0 to 1, not `-0.5`"],
    );
    check(
        &minimal("routing: {hash_on: [tenant]}"),
        &["routing.hash_on[0]: `tenant` is none of"],
    );
    check(
        &minimal("predicted: {tokens_per_worker: 0}"),
        &["predicted.tokens_per_worker: must be at least 1"],
    );
    check(
        &minimal("models: [{name: m}, {name: m}]"),
        &["models[1].name: `m` is listed twice"],
    );
    check(
        &minimal("models: [{policy: random}]"),
        &["models[0]: the key `name` is missing"],
    );
    check(&minimal("log: {level: 'a=b=c'}"), &["log.level"]);
    check(
        &minimal("log: {level: 'info,loud'}"),
        &["log.level: `loud` is not a log level; write `error`, `warn`"],
    );
    check(
        "discovery: [{dns: {name: a}, file: {path: b}}]",
        &["discovery[0]: `file` and `dns` are two entries of `discovery`"],
    );
    check(
        "discovery: [{consul: {}}]",
        &[
            "discovery[0].consul: unknown key `consul`; expected one of the keys `static`, `file`, `dns`, `kubernetes`",
        ],
    );
    check("workers:\n\t- a", &["use spaces"]);
    check(
        "workers: [{url: 'http://a:1', events: auto}]",
        &[
            "workers[0].events: expected a map of keys and values, found `auto`; write `{from: auto}`",
        ],
    );
    check(
        &minimal("responses: {store: redis}"),
        &["found `redis`; write `{redis: \"redis://HOST:6379\"}`"],
    );
    for url in ["redis://a:1", "rediss://a:1"] {
        let hint = format!("found `{url}`; write `{{redis: \"redis://HOST:6379\"}}`");
        let text = minimal(&format!("responses: {{store: '{url}'}}"));
        check(&text, &[&hint]);
    }
    check(
        "workers: ['http://a:1', 'http://a:1']",
        &["workers[1].url: `a:1` is workers[0] already"],
    );
    check(&minimal("replicas: 3"), &["replicas: unknown key"]);
    check(
        &minimal(
            "responses: {mode: pass_through}\npeers:\n  listen: :9701\n  discovery:\n    \
             - static: ['10.0.0.2:9701', router-1]",
        ),
        &[
            "c.yaml:4:3: peers.secret: is needed, because `peers.listen` (`:9701`) can be reached from other hosts",
            "c.yaml:6:16: peers.discovery[0].static[0]: `10.0.0.2:9701` is another host",
            "c.yaml:6:33: peers.discovery[0].static[1]: `router-1` is not an address",
        ],
    );
    check(
        &minimal("responses: {mode: pass_through}\npeers: {listen: ':8080', secret: short}"),
        &[
            "peers.listen: has the port of `api.listen` (`:8080`)",
            "peers.secret: has 5 bytes and must have 16 at least",
        ],
    );
    check(
        &minimal(
            "responses: {mode: pass_through}\npeers:\n  listen: :9701\n  discovery: ['127.0.0.1:1', router-1]",
        ),
        &[
            "c.yaml:4:3: peers.secret: is needed",
            "peers.discovery[0].static[1]: `router-1` is not an address",
        ],
    );
    check(
        &minimal("peers: {discovery: [{dns: {name: 'a:1'}}]}"),
        &["peers.listen: is needed when `peers.discovery` is set"],
    );
    check(
        &minimal(
            "tenants: [{name: a, keys: [short, sk-long-enough-for-it]}, {name: b, keys: [sk-only-an-example]}]",
        ),
        &[
            "c.yaml:2:28: tenants[0].keys[0]: has fewer than 16 characters and can be guessed",
            "c.yaml:2:77: tenants[1].keys[0]: is a key of the examples",
        ],
    );
    // Where no other host can try them.
    let loopback = "workers: ['http://a:1']\napi: {listen: '127.0.0.1:8080'}\n";
    let short = format!("{loopback}tenants: [{{name: a, keys: [short]}}]");
    Config::parse("c.yaml", &short).unwrap();
    check(
        &format!("{loopback}tenants: [{{name: a, keys: [x]}}, {{name: a, keys: [x, '']}}]"),
        &[
            "c.yaml:3:40: tenants[1].name: `a` is tenants[0] already",
            "c.yaml:3:50: tenants[1].keys[0]: is a key of tenants[0] already",
            "c.yaml:3:53: tenants[1].keys[1]: is empty",
        ],
    );
    check(
        &minimal(&format!(
            "{REPLICAS}\nresponses:\n  state_token: {{keys: []}}"
        )),
        &[
            "responses.store: is memory, which each replica has for itself",
            "responses.state_token.keys: with several replicas a key is needed",
        ],
    );
    check(
        &minimal(
            "responses:\n  state_token:\n    keys:\n      - hunter2hunter2\n      - '${WARMROUTE_NO_SUCH}'",
        ),
        &[
            "c.yaml:5:9: responses.state_token.keys[0]: ",
            "WARMROUTE_NO_SUCH",
        ],
    );
    check(
        "workers: [{url: '127.0.0.1:1'}]",
        &["workers[0].url: `127.0.0.1:1`"],
    );
    check(
        "workers: ['ftp://a']",
        &["the scheme must be http, https, h2c or unix, not ftp"],
    );
    check(
        "workers: [{url: 'http://a:1'}, {url: 'http://a:1/', name: b}]",
        &["workers[1].url: `a:1` is workers[0] already"],
    );
    check(
        "workers: [{url: 'http://a:1', api_key: '${WARMROUTE_NO_SUCH}'}]",
        &["WARMROUTE_NO_SUCH"],
    );
    check(
        "workers: [{url: 'http://a:1', api_key: 'file:/no/such/key'}]",
        &["/no/such/key"],
    );
    check(
        "discovery: [{dns: {name: 'http://a'}}]",
        &["discovery[0].dns.name: `http://a` must be a name alone"],
    );
}

#[test]
fn batches_of_several_replicas_need_redis_in_any_mode() {
    let file = |peers: &str, responses: &str| {
        minimal(&format!(
            "batches: {{folder: f}}\n{peers}\nresponses: {{{responses}}}"
        ))
    };
    let refusal = "c.yaml:2:10: batches: would be in the memory of each replica";
    check(&file(REPLICAS, "mode: pass_through"), &[refusal]);
    check(
        &file(REPLICAS, "mode: stateful"),
        &[
            refusal,
            "responses.store: is memory",
            "responses.state_token.keys: with several replicas",
        ],
    );
    let redis = "mode: pass_through, store: {redis: 'redis://a'}";
    for good in [file(REPLICAS, redis), file("", "mode: pass_through")] {
        Config::parse("c.yaml", &good).unwrap();
    }
}

#[test]
fn batches_without_storage_are_refused() {
    let refusal = "c.yaml:2:10: batches: has neither `folder` nor `s3`";
    check(&minimal("batches: {}"), &[refusal]);
    check(&minimal("batches: {max_lines: 7}"), &[refusal]);
    // As `check` prints a configuration without batches.
    Config::parse("c.yaml", &minimal("batches: {folder: '', max_lines: 7}")).unwrap();
    Config::parse("c.yaml", &minimal("")).unwrap();
}

#[test]
fn webhooks_report_batches_in_any_mode() {
    let file = |rest: &str| {
        minimal(&format!(
            "responses: {{mode: pass_through}}\nwebhooks: {{endpoints: [{{name: a, url: 'https://h/x', \
             secrets: [whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw]}}]}}\n{rest}"
        ))
    };
    let batches = file("batches: {folder: f}");
    Config::parse("c.yaml", &batches).unwrap();
    let refusal = "webhooks.endpoints: would never get an event";
    check(&file(""), &[refusal]);
    let with = |events: &str| batches.replace("name: a,", &format!("name: a, events: [{events}],"));
    let refusal = "webhooks.endpoints[0].events: lists only events of background responses";
    check(&with("response.completed"), &[refusal]);
    Config::parse("c.yaml", &with("response.completed, batch.failed")).unwrap();
}

#[test]
fn a_tiny_index_of_kv_events_is_refused() {
    check(
        &minimal("kv_events: {max_index_memory: 1023KiB}"),
        &["kv_events.max_index_memory: must be at least 1MiB, not `1023KiB`"],
    );
}

#[test]
fn a_value_that_is_refused_is_not_reported_as_missing_too() {
    for (rest, key) in [
        (
            "admin: {listen: ':9', token: '${NO_SUCH}'}",
            "admin.token: ",
        ),
        (
            "admin: {listen: ':9', tokens: {operate: ['${NO_SUCH}']}}",
            "admin.tokens.operate[0]: ",
        ),
        (
            "admin: {listen: ':9', token: 'file:/no/such'}",
            "admin.token: cannot read",
        ),
        (
            "peers: {listen: ':9', secret: '${NO_SUCH}', discovery: ['10.0.0.2:9']}\nresponses: {mode: pass_through}",
            "peers.secret: ",
        ),
        (
            "admin: {tls: {client_ca: '${NO_SUCH}', self_signed: true}, client_names: {operate: [a]}}",
            "admin.tls.client_ca: ",
        ),
        (
            "tenants: [5]\njwt: {issuers: [{issuer: 'https://i', audiences: [a], jwks: 'https://i/j'}], default_tenant: a}",
            "tenants[0]: expected a map",
        ),
        (
            "tenants: [5, {name: b, keys: [abcdefabcdefabcdef]}]\nwebhooks: {endpoints: [{name: a, url: 'https://h/x', secrets: [whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw], tenant: a}]}",
            "tenants[0]: expected a map",
        ),
    ] {
        check(&minimal(rest), &[key]);
    }
    let pair = "workers: [{url: 'http://a:1', role: prefill}, {url: 'http://b:1', role: decode}]\nprefill_decode: {connector: nope}";
    check(pair, &["prefill_decode.connector: expected one of"]);
    let labels = "workers: [{url: 'http://a:1', labels: {rack: [1]}}]\nprefill_decode: {connector: nixl, topology: rack}";
    check(labels, &["workers[0].labels.rack: expected a text"]);
}

#[test]
fn all_mistakes_are_reported_at_once_in_the_order_of_the_file() {
    check(
        "workers:\n  - url: ftp://a\n  - {url: 'http://b:1', rolle: prefill}\npredicted:\n  bytes_per_token: many\nrequests:\n  max_attempts: 0\nlog:\n  level: '='\n",
        &[
            "c.yaml:2:10: workers[0].url",
            "c.yaml:3:25: workers[1].rolle: unknown key `rolle`; did you mean `role`?",
            "c.yaml:5:20: predicted.bytes_per_token: expected a number, found `many`",
            "c.yaml:7:17: requests.max_attempts: must be",
            "c.yaml:9:10: log.level",
        ],
    );
}

fn listed(text: &str, has_roles: bool) -> Result<Vec<Member>, String> {
    parse_workers("w.yaml", text, &WorkerDefaults::default(), has_roles).members
}

#[test]
fn a_workers_file_says_which_files_its_secrets_are_in() {
    let key = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "workers:\n- {{url: 'http://a:1', api_key: 'file:{0}'}}\n- {{url: 'http://b:1', api_key: 'file:{0}'}}\n",
        key.path().display()
    );
    std::fs::write(key.path(), "one").unwrap();
    let parse = || parse_workers("w.yaml", &text, &WorkerDefaults::default(), false);
    let mut parsed = parse();
    assert!(!parsed.secret_files.have_changed());
    std::fs::write(key.path(), "another").unwrap();
    assert!(parsed.secret_files.have_changed());
    let keys_of = |members: Result<Vec<Member>, String>| {
        let members = members.unwrap().into_iter();
        let keys = members.map(|member| member.authorization.unwrap());
        keys.collect::<Vec<_>>()
    };
    assert_eq!(keys_of(parsed.members), ["Bearer one"; 2]);
    assert_eq!(keys_of(parse().members), ["Bearer another"; 2]);
}

#[test]
fn a_workers_file_is_read_like_the_configuration() {
    let parse = |text| listed(text, false);
    assert!(parse("").unwrap_err().contains("workers: is missing"));
    assert!(parse("workers: []").unwrap().is_empty());
    let members = parse("workers: [{url: 'http://a:1', name: x}]").unwrap();
    assert_eq!(
        (members[0].name.as_str(), members[0].address.as_str()),
        ("x", "a:1")
    );
    let error = parse("workers:\n- url: a\n- {url: 'http://b', nam: y}\n").unwrap_err();
    assert!(
        error.contains("w.yaml:2:8: workers[0].url") && error.contains("w.yaml:3:"),
        "{error}"
    );
}

#[test]
fn a_role_needs_a_connector_and_is_told_how_to_write_one() {
    let text = |rest: &str| {
        format!(
            "workers: [{{url: 'http://a:1', role: prefill}}, {{url: 'http://b:1', role: decode}}]\n{rest}"
        )
    };
    let problems = Config::parse("c", &text("")).unwrap_err().to_string();
    for (place, role) in [(0, "prefill"), (1, "decode")] {
        let path = format!("workers[{place}].role");
        assert!(problems.contains(&path), "{problems}");
        let problem = format!("`{role}` needs a connector");
        assert!(problems.contains(&problem), "{problems}");
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
    let text = "workers: [{url: 'http://a:1', role: decode}]";
    let error = listed(text, false).unwrap_err();
    assert!(error.contains("workers[0].role"), "{error}");
    assert_eq!(listed(text, true).unwrap().len(), 1);
    let wrong = Config::parse("c", &minimal("prefill_decode: {connector: nxil}"));
    assert!(wrong.unwrap_err().to_string().contains("nixl"));
    let wrong = Config::parse(
        "c",
        &minimal("prefill_decode: {advanced: {transfer_timeout: 0s, bootstrap_port: 0}}"),
    );
    let problems = wrong.unwrap_err().to_string();
    assert!(
        problems.contains("transfer_timeout") && problems.contains("bootstrap_port"),
        "{problems}"
    );
}

fn split_by(workers: &str, rest: &str) -> Result<Config, String> {
    let text = format!("{workers}\nprefill_decode: {{connector: nixl{rest}}}\n");
    Config::parse("c", &text).map_err(|problems| problems.to_string())
}

#[test]
fn beside_prefill_workers_with_a_dns_name_the_others_are_decode_workers() {
    let both = "discovery: [{dns: {name: all}}, {dns: {name: p, role: prefill}}]";
    let problems = split_by(both, "").unwrap_err();
    assert!(problems.contains("discovery[0].dns.role"), "{problems}");
    assert!(problems.contains("write `role: decode`"), "{problems}");
    for fine in [
        "discovery: [{dns: {name: all, role: decode}}, {dns: {name: p, role: prefill}}]",
        "discovery: [{dns: {name: all}}]",
        "discovery: [{dns: {name: p, role: prefill}}]",
    ] {
        assert_eq!(split_by(fine, "").err(), None, "{fine}");
    }
}

#[test]
fn a_topology_that_no_worker_has_as_a_label_is_a_problem() {
    let zone = ", topology: zone";
    let listed = |labels: &str| format!("workers: [{{url: 'http://a:1', labels: {{{labels}}}}}]");
    let problems = split_by(&listed("zoen: a"), zone).unwrap_err();
    assert!(
        problems.contains("prefill_decode.topology: no worker has the label `zone`"),
        "{problems}"
    );
    let file = "discovery: [{file: {path: workers.yaml}}]";
    let dns = "discovery: [{dns: {name: all, labels: {zone: a}}}]";
    for fine in [&*listed("zone: a"), file, dns] {
        assert_eq!(split_by(fine, zone).err(), None, "{fine}");
    }
    assert_eq!(split_by(&listed(""), "").err(), None);
}

#[test]
fn a_stream_is_kept_alive_every_second_at_most() {
    let problems = |duration: &str| {
        let config = minimal(&format!("responses: {{keep_alive: {duration}}}"));
        Config::parse("c", &config)
            .err()
            .map(|error| error.to_string())
    };
    for fine in ["0s", "0", "1s", "15s"] {
        assert_eq!(problems(fine), None);
    }
    for wrong in ["1ms", "999ms"] {
        let problems = problems(wrong).unwrap();
        assert!(
            problems.contains("responses.keep_alive: must be at least 1s"),
            "{problems}"
        );
    }
}
