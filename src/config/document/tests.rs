//! Facts about whole documents: a file, and the lines that its operator gets to see.

use std::collections::BTreeMap;
use std::io;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use super::{Document, Outside, Problems, to_yaml};
use crate::secret::Secret;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Settings {
    server: Server,
    fleet: Fleet,
    routing: Routing,
    auth: Auth,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Server {
    port: u16,
    host: String,
    timeout_ms: Option<u64>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            port: 8080,
            host: "localhost".to_owned(),
            timeout_ms: Some(1_000),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Fleet {
    workers: Vec<Worker>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Worker {
    url: String,
    #[serde(default)]
    role: Role,
    #[serde(default)]
    weight: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    #[default]
    Both,
    Prefill,
    Decode,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Routing {
    policy: Policy,
    labels: BTreeMap<String, String>,
    ports: BTreeMap<u16, Name>,
    span: Option<(u64, u64)>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Policy {
    #[default]
    RoundRobin,
    CacheAware {
        #[serde(default)]
        depth: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Name(String);

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Auth {
    keys: Vec<Secret>,
    admin: Option<Secret>,
}

const OUTSIDE: Outside<'static> = Outside {
    env: &env,
    read_file: &read_file,
};

fn env(name: &str) -> Option<String> {
    let value = match name {
        "PORT" => "9000",
        "HOST" => "engine-1",
        "DIGITS" => "0123",
        "EMPTY" => "",
        "DOLLARS" => "${PORT}$$",
        _ => return None,
    };
    Some(value.to_owned())
}

fn read_file(path: &str) -> io::Result<String> {
    match path {
        "/run/key" => Ok("from-a-file\n".to_owned()),
        "/run/empty" => Ok("\n".to_owned()),
        _ => Err(io::Error::from(io::ErrorKind::NotFound)),
    }
}

fn read(text: &str) -> Result<Settings, Problems> {
    let mut document = Document::parse("config.yaml", text.as_bytes(), OUTSIDE);
    let settings = document.read();
    document.finish(settings)
}

fn good(text: &str) -> Settings {
    read(text).unwrap_or_else(|problems| panic!("{problems}"))
}

#[track_caller]
fn check(text: &str, expected: &[&str]) {
    let problems = read(text).expect_err("the file has problems").to_string();
    let expected: Vec<String> = expected
        .iter()
        .map(|line| format!("config.yaml:{line}"))
        .collect();
    assert_eq!(problems.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn an_empty_file_gives_the_defaults() {
    for text in [
        "",
        "\n# nothing\n",
        "---\n",
        "server:\nfleet:\n  # workers:\n",
        "{}",
        "\u{feff}",
    ] {
        assert_eq!(good(text), Settings::default(), "{text:?}");
    }
}

#[test]
fn a_whole_file_is_read() {
    let settings = good(
        "server: {port: 0x50, host: 'a', timeout_ms: null}\n\
         fleet:\n  workers:\n  - &one {url: http://a, weight: 2}\n  - *one\n  - url: b\n    role: prefill\n\
         routing:\n  policy:\n    cache_aware:\n      depth: 3\n  labels: {a.b: c}\n  \
         ports: {\"80\": web}\n  span: [1, 2]\n",
    );
    assert_eq!(
        settings.server,
        Server {
            port: 80,
            host: "a".to_owned(),
            timeout_ms: None
        }
    );
    assert_eq!(settings.fleet.workers[1].weight, 2.0);
    assert_eq!(settings.fleet.workers[2].role, Role::Prefill);
    assert_eq!(settings.routing.policy, Policy::CacheAware { depth: 3 });
    assert_eq!(settings.routing.ports[&80], Name("web".to_owned()));
}

#[test]
fn an_unknown_key_is_told_with_the_name_it_resembles() {
    check(
        "routing:\n  polcy: round_robin\n  zebra: 1\nSrever: {}\n",
        &[
            "2:3: routing.polcy: unknown key `polcy`; did you mean `policy`?",
            "3:3: routing.zebra: unknown key `zebra`",
            "4:1: Srever: unknown key `Srever`; did you mean `server`?",
        ],
    );
    check(
        "routing:\n  policy:\n    cache_aware: {dept: 3}\n",
        &["3:19: routing.policy.cache_aware.dept: unknown key `dept`; did you mean `depth`?"],
    );
}

#[test]
fn a_value_of_the_wrong_type_is_told_where_it_stands() {
    check(
        "server:\n  port: abc\n  host: 12\n  timeout_ms: -1\n",
        &[
            "2:9: server.port: expected u16, found string \"abc\"",
            "3:9: server.host: expected a string, found integer `12`",
            "4:15: server.timeout_ms: expected u64, found integer `-1`",
        ],
    );
    check(
        "server:\n  port: 70000\n",
        &["2:9: server.port: expected u16, found integer `70000`"],
    );
    check(
        "server:\n  port:\n  host: a\n",
        &["2:3: server.port: expected u16, found nothing"],
    );
    check(
        "server: 3\n",
        &["1:9: server: expected a map, found integer `3`"],
    );
    check(
        "server: [3]\n",
        &["1:9: server: expected a map, found a list"],
    );
    check("- 3\n", &["1:1: expected a map, found a list"]);
    check(
        "fleet:\n  workers: http://a\n",
        &["2:12: fleet.workers: expected a list, found string \"http://a\""],
    );
    check(
        "routing: {ports: {web: x}}",
        &["1:24: routing.ports.web: expected u16, found string \"web\""],
    );
}

#[test]
fn an_unknown_choice_is_told_with_the_known_ones() {
    check(
        "routing: {policy: cache_awre}\nfleet: {workers: [{url: a, role: chef}]}\n",
        &[
            "1:19: routing.policy: unknown value `cache_awre`; did you mean `cache_aware`?",
            "2:34: fleet.workers[0].role: unknown value `chef`; \
             expected one of `both`, `prefill`, `decode`",
        ],
    );
    check(
        "routing: {policy: [1]}",
        &["1:19: routing.policy: expected one of `round_robin`, `cache_aware`"],
    );
}

#[test]
fn a_missing_field_is_told_at_its_parent_and_the_others_keep_their_numbers() {
    check(
        "fleet:\n  workers:\n    - weight: 1\n    - url: a\n      weight: x\n    - url: b\n      wieght: 2\n",
        &[
            "3:7: fleet.workers[0]: missing field `url`",
            "5:15: fleet.workers[1].weight: expected f64, found string \"x\"",
            "7:7: fleet.workers[2].wieght: unknown key `wieght`; did you mean `weight`?",
        ],
    );
}

#[test]
fn what_follows_from_a_problem_is_not_told() {
    check(
        "fleet: {workers: [{url: 7}]}",
        &["1:25: fleet.workers[0].url: expected a string, found integer `7`"],
    );
    check(
        "routing: {span: [1, x]}",
        &["1:21: routing.span[1]: expected u64, found string \"x\""],
    );
    check(
        "routing: {span: [1]}",
        &["1:17: routing.span: expected a tuple of size 2, found 1 items"],
    );
}

#[test]
fn all_kinds_of_problems_in_one_file_come_together() {
    check(
        "server:\n  port: eighty\n  hots: a\nfleet:\n  workers:\n  - url: ${NO_URL}\n  - role: decode\n\
         auth:\n  keys: [file:/none]\nrouting:\n  labels: {a: 1, a: 2, 3: b}\nserver: {}\n",
        &[
            "2:9: server.port: expected u16, found string \"eighty\"",
            "3:3: server.hots: unknown key `hots`; did you mean `host`?",
            "6:10: fleet.workers[0].url: environment variable `NO_URL` is not set, and there is no \
             default (`${NO_URL:-default}`)",
            "7:5: fleet.workers[1]: missing field `url`",
            "9:10: auth.keys[0]: cannot read `/none`: entity not found",
            "11:15: routing.labels.a: expected a string, found integer `1`",
            "11:18: routing.labels: key `a` is given twice",
            "11:24: routing.labels: key `3` is not a string; put it in quotes",
            "12:1: key `server` is given twice",
        ],
    );
}

#[test]
fn broken_yaml_is_told_with_its_place() {
    let lines = |text: &str| read(text).unwrap_err().to_string();
    for (text, place) in [
        ("server: {port: 1\nfleet: [\n", "config.yaml:"),
        ("server:\n  port: 1\n host: a\n", "config.yaml:3:"),
        ("a: 'open\n", "config.yaml:"),
        ("a: b: c\n", "config.yaml:1:"),
        ("\ta: 1\n", "config.yaml:1:"),
    ] {
        let problem = lines(text);
        assert!(
            problem.starts_with(place) && problem.lines().count() == 1,
            "{text:?}: {problem}"
        );
    }
}

#[test]
fn what_is_not_supported_is_told() {
    check(
        "server: *none\n",
        &["1:9: server: no anchor `&none` comes before this alias"],
    );
    check(
        "fleet: {workers: &w [*w]}\n",
        &["1:22: fleet.workers[0]: this alias stands inside the value that it refers to"],
    );
    check(
        "server: {port: 1}\n---\nserver: {port: 2}\n",
        &["2:1: a second document starts here; there can be only one"],
    );
    check(
        "server:\n  ? [a]\n  : b\n",
        &["2:5: server: keys must be strings"],
    );
    check(
        "server:\n  <<: {port: 1}\n",
        &["2:3: server: merge keys (`<<`) are not supported"],
    );
    check(
        "server:\n  host: !!str 12\n",
        &[
            "2:15: server: tags (`!...`) are not supported; quotes make a string",
            "2:15: server.host: expected a string, found integer `12`",
        ],
    );
    check(
        "fleet: {workers: [{url: a, weight: .inf}]}",
        &["1:36: fleet.workers[0].weight: `.inf` is not a finite number"],
    );
    check(
        "server: {timeout_ms: 99999999999999999999}",
        &[
            "1:22: server.timeout_ms: `99999999999999999999` is too large for an integer; \
         put it in quotes if it is a string",
        ],
    );
}

#[test]
fn what_would_grow_without_bound_is_refused() {
    check(&"[".repeat(100_000), &["1:256: recursion limit exceeded"]);
    let deep = "[".repeat(100) + &"]".repeat(100);
    check(
        &deep,
        &[&format!(
            "1:65: {}: nested more than 64 levels deep",
            "[0]".repeat(63)
        )],
    );
    let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..10 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        laughs.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
    }
    let problems = read(&laughs).unwrap_err().to_string();
    assert!(
        problems.ends_with("make the file too large (over 1048576 bytes)"),
        "{problems}"
    );
    let long = "#".repeat(super::yaml::TEXT_BYTES_MAX + 1);
    check(&long, &["1:1: file is larger than 1048576 bytes"]);
    let many = "x: 1\n".repeat(150);
    let problems = read(&many).unwrap_err().to_string();
    assert_eq!(
        problems.lines().last(),
        Some("config.yaml: 50 more problems")
    );
}

#[test]
fn text_that_is_not_utf_8_is_told_with_its_place() {
    let document = Document::parse("config.yaml", b"server:\n  host: \xff\n", OUTSIDE);
    let problems = document.finish(None::<Settings>).unwrap_err();
    assert_eq!(problems.to_string(), "config.yaml:2:9: file is not UTF-8");
}

#[test]
fn variables_are_put_in_and_typed_where_nothing_is_quoted() {
    let server = good(
        "server:
  port: ${PORT}
  host: ${DIGITS}
  timeout_ms: ${NONE:-5}
",
    )
    .server;
    // A string is asked for, so digits remain one.
    let host = "0123".to_owned();
    assert_eq!(
        server,
        Server {
            port: 9000,
            host,
            timeout_ms: Some(5)
        }
    );
    let server = good(
        "server:
  timeout_ms: ${EMPTY}
  host: ${EMPTY}
",
    )
    .server;
    assert_eq!((server.timeout_ms, server.host.as_str()), (None, ""));
    for (written, read) in [
        ("a-${PORT}-${HOST}", "a-9000-engine-1"),
        ("'${PORT}'", "9000"),
        ("${EMPTY:-b}", "b"),
        ("${NONE:-}", ""),
        ("$${PORT}", "${PORT}"),
        ("$$$${PORT} $5 $", "$${PORT} $5 $"),
        // What is put in is not looked at again.
        ("${DOLLARS}", "${PORT}$$"),
        ("${DOLLARS}${PORT}", "${PORT}$$9000"),
    ] {
        assert_eq!(
            good(&format!(
                "server:
  host: {written}
"
            ))
            .server
            .host,
            read,
            "{written}"
        );
    }
    check(
        "server:
  port: \"${PORT}\"
  timeout_ms: 1${PORT}
",
        &[
            "2:9: server.port: expected u16, found the string that `${PORT}` stands for",
            "3:15: server.timeout_ms: expected u64, found the string that `1${PORT}` stands for",
        ],
    );
    check(
        "server:
  host: ${A}${1}${B
",
        &[
            "2:9: server.host: environment variable `A` is not set, and there is no default \
         (`${A:-default}`)",
            "2:9: server.host: `1` is not the name of an environment variable",
            "2:9: server.host: `${` without `}`; write `$${` for the characters themselves",
        ],
    );
    check(
        "server: {port: ${PORT}}
",
        &[
            "1:17: while parsing a flow mapping, did not find expected ',' or '}' \
         (`${…}` needs quotes between braces or brackets)",
        ],
    );
}

#[test]
fn secrets_come_from_text_variables_and_files_and_are_never_printed() {
    let auth =
        good("auth: {keys: [plain, '${DIGITS}', '${DIGITS}', file:/run/key], admin: '${EMPTY}'}")
            .auth;
    let keys: Vec<&str> = auth.keys.iter().map(Secret::expose).collect();
    assert_eq!(keys, ["plain", "0123", "0123", "from-a-file"]);
    assert_eq!(
        format!("{auth:?}"),
        "Auth { keys: [***, ***, ***, ***], admin: Some(***) }"
    );
    assert!(!to_yaml(&auth).unwrap().contains("plain"));
    check(
        "auth:\n  keys:\n  - file:/none\n  - file:/run/empty\n  - 123\n",
        &[
            "3:5: auth.keys[0]: cannot read `/none`: entity not found",
            "4:5: auth.keys[1]: `/run/empty` is empty",
            "5:5: auth.keys[2]: expected a string; put the secret in quotes",
        ],
    );
}

#[test]
fn a_later_check_names_the_nearest_place_that_the_file_has() {
    let text = "fleet:\n  workers:\n  - url: 1\n  - url: b\nrouting:\n  labels: {\"a.b\": c}\n";
    let mut document = Document::parse("config.yaml", text.as_bytes(), OUTSIDE);
    let settings: Option<Settings> = document.read();
    assert_eq!(
        settings
            .as_ref()
            .map(|settings| settings.fleet.workers.len()),
        Some(1)
    );
    // The only worker that was read is the second of the file.
    document.problem("fleet.workers[0].url", "is not a url");
    document.problem("fleet.workers[0].role.name", "has no role");
    document.problem("routing.labels[\"a.b\"]", "is not a label");
    document.problem("server.port", "is taken");
    // The first worker was left out, so this may not be true of the file.
    document.problem("fleet.workers", "list at least two workers");
    let problems = document.finish(settings).unwrap_err().to_string();
    let expected = [
        "config.yaml:1:1: server.port: is taken",
        "config.yaml:3:10: fleet.workers[0].url: expected a string, found integer `1`",
        "config.yaml:4:5: fleet.workers[1].role.name: has no role",
        "config.yaml:4:10: fleet.workers[1].url: is not a url",
        "config.yaml:6:19: routing.labels[\"a.b\"]: is not a label",
    ];
    assert_eq!(problems.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn values_from_the_environment_are_not_told() {
    check(
        "server: {port: '${HOST}', timeout_ms: \"${HOST}\"}\nrouting: {policy: '${HOST}'}\n",
        &[
            "1:16: server.port: expected u16, found the string that `${HOST}` stands for",
            "1:39: server.timeout_ms: expected u64, found the string that `${HOST}` stands for",
            "2:19: routing.policy: expected one of `round_robin`, `cache_aware`, \
         found what `${HOST}` stands for",
        ],
    );
}

#[test]
fn a_configuration_is_printed_in_the_order_of_its_fields() {
    let mut settings = good("fleet: {workers: [{url: http://a:80}, {url: 'b c'}]}");
    settings
        .routing
        .labels
        .insert("no".to_owned(), "$5".to_owned());
    assert_eq!(
        to_yaml(&settings).unwrap(),
        "server:\n  port: 8080\n  host: localhost\n  timeout_ms: 1000\n\
         fleet:\n  workers:\n    - url: http://a:80\n      role: both\n      weight: 0.0\n    \
         - url: \"b c\"\n      role: both\n      weight: 0.0\n\
         routing:\n  policy: round_robin\n  labels:\n    no: \"$$5\"\n  ports: {}\n  span: null\n\
         auth:\n  keys: []\n  admin: null\n"
    );
}

fn json() -> impl Strategy<Value = Json> {
    let text = prop_oneof![
        any::<String>(),
        "[-+.0-9eExo_]{0,6}",
        "[ :#&*!|>'\"%@`,?{}\\[\\]$~\\-a\n\t]{0,6}",
        "(null|true|yes|~|<<|=|---|\\.\\.\\.|\\$\\{PORT\\}|file:a|http://a:1/b)",
    ];
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<u64>().prop_map(Json::from),
        prop::num::f64::NORMAL.prop_map(Json::from),
        text.clone().prop_map(Json::from),
    ];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        let entry = (text.clone(), inner.clone());
        let map = prop::collection::vec(entry, 0..5);
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(Json::from),
            map.prop_map(|entries| Json::from(Map::from_iter(entries))),
        ]
    })
}

/// A file that is fine, as something to break.
const WHOLE: &str = "server: {port: 9000, host: \"${HOST:-a}\"}\nfleet:\n  workers:\n  - &w\n    \
    url: http://a\n    weight: 1.5\n  - *w\nrouting:\n  policy:\n    cache_aware:\n      depth: 3\n  \
    labels:\n    a: |\n      text\n      more\n    b: >-\n      folded\nauth:\n  keys: [file:/run/key]\n";

/// What tends to matter to a YAML reader.
const BITS: [&str; 24] = [
    ":",
    "- ",
    "\n",
    "  ",
    "{",
    "}",
    "[",
    "]",
    "&w",
    "*w",
    "${",
    "$$",
    "\"",
    "'",
    "#",
    "|",
    ">",
    "!!str ",
    "---\n",
    "? ",
    "%YAML",
    "\t",
    "é\u{2028}",
    "\r",
];

fn never_panics(text: &[u8]) {
    let mut document = Document::parse("config.yaml", text, OUTSIDE);
    let settings: Option<Settings> = document.read();
    let _: Option<Json> = document.read();
    for path in [
        "fleet.workers[0].url",
        "a[",
        "[\"",
        "[\"\\",
        ".",
        "[99999999999999999999]",
        "",
    ] {
        document.problem(path, "checked");
    }
    assert!(document.finish(settings).is_err());
    if let Err(problems) = Document::parse("config.yaml", text, OUTSIDE).finish(None::<Json>) {
        let lines = problems.to_string().lines().count();
        assert!(lines <= problems.iter().count() + 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        never_panics(&bytes);
    }

    #[test]
    fn no_text_makes_it_panic(text in any::<String>()) {
        never_panics(text.as_bytes());
    }

    #[test]
    fn no_slips_in_a_good_file_make_it_panic(
        slips in prop::collection::vec((0..WHOLE.len(), 0..4usize, 0..BITS.len()), 1..8),
    ) {
        let mut text = WHOLE.to_owned();
        for (at, cut, bit) in slips {
            let start = text.floor_char_boundary(at.min(text.len()));
            let end = text.floor_char_boundary((at + cut).min(text.len())).max(start);
            text.replace_range(start..end, BITS[bit]);
        }
        never_panics(text.as_bytes());
    }

    #[test]
    fn what_is_printed_reads_back_equal(value in json()) {
        let text = to_yaml(&value).unwrap();
        let mut document = Document::parse("config.yaml", text.as_bytes(), OUTSIDE);
        let back: Option<Json> = document.read();
        let back = document.finish(back);
        prop_assert_eq!(back, Ok(value), "{}", text);
    }
}

#[test]
fn the_good_file_is_good() {
    assert_eq!(good(WHOLE).server.port, 9000);
    assert_eq!(good(WHOLE).routing.labels["a"], "text\nmore\n");
    let printed = to_yaml(&json!({"a": {"b": []}, "c": [[1, {"d": "x"}], []]})).unwrap();
    assert_eq!(printed, "a:\n  b: []\nc:\n  - - 1\n    - d: x\n  - []\n");
}
