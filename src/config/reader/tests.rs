//! Facts about whole files: what is read, and the lines that an operator sees of a bad one.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use proptest::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Outside, Problems, Reader, to_yaml};
use crate::secret::Secret;
use crate::units::{DurationText, SizeText};

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Settings {
    server: Server,
    workers: Vec<Worker>,
    labels: BTreeMap<String, String>,
    secret: Secret,
    kwargs: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Server {
    #[schemars(range(min = 1))]
    port: u16,
    host: String,
    is_open: bool,
    #[serde(with = "DurationText")]
    timeout: Duration,
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1KiB", "max" = "1MiB"))]
    room: u64,
    #[serde(with = "SizeText")]
    disk: u64,
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "0s"))]
    pause: Duration,
    weight: Option<f64>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            port: 8080,
            host: "localhost".to_owned(),
            is_open: false,
            timeout: Duration::from_secs(1),
            room: 1 << 20,
            disk: 1 << 30,
            pause: Duration::ZERO,
            weight: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Worker {
    url: String,
    #[serde(default)]
    role: Role,
}

#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Role {
    #[default]
    Both,
    Prefill,
}

fn env(name: &str) -> Option<String> {
    Some(match name {
        "PORT" => "9000".to_owned(),
        "HOST" => "h".to_owned(),
        "EMPTY" => String::new(),
        "HUSH" => "hunter2".to_owned(),
        "SIXTY" => "60s".to_owned(),
        _ => return None,
    })
}

fn read_file(path: &str) -> io::Result<String> {
    match path {
        "/key" => Ok("hunter2\n".to_owned()),
        "/empty" => Ok("\n".to_owned()),
        _ => Err(io::Error::from(io::ErrorKind::NotFound)),
    }
}

fn read(text: &[u8]) -> Result<Settings, Problems> {
    let outside = Outside {
        env: &env,
        read_file: &read_file,
        may_lack_files: false,
    };
    let (reader, settings) = Reader::read("f", text, outside);
    reader.finish(settings)
}

fn good(text: &str) -> Settings {
    read(text.as_bytes()).unwrap_or_else(|problems| panic!("{text}\n{problems}"))
}

/// Each line that the operator sees begins so.
fn check(text: &str, expected: &[&str]) {
    let problems = read(text.as_bytes()).unwrap_err().to_string();
    let lines: Vec<&str> = problems.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{text}\n{problems}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{text}\n{line}\n{expected}");
    }
    assert!(!problems.contains("hunter2"), "{problems}");
}

#[test]
fn an_empty_file_gives_the_defaults() {
    for text in ["", "# nothing\n", "---\n", "{}"] {
        assert_eq!(good(text), Settings::default(), "{text:?}");
    }
}

#[test]
fn a_whole_file_is_read() {
    let settings = good(
        "server:\n  port: 9000\n  host: 007\n  is_open: true\n  timeout: 1m 30s\n  room: 4KiB\n  weight: 2\n\
         workers:\n- url: a\n- {url: b, role: prefill}\nlabels: {x: 1, y: true, 'z': null-like}\nsecret: s\n\
         kwargs: {a: 1, b: [true, ~, x], c: {d: 1.5}}\n",
    );
    assert_eq!(settings.server.port, 9_000);
    assert_eq!(settings.server.host, "007");
    assert_eq!(settings.server.timeout, Duration::from_secs(90));
    assert_eq!(settings.server.room, 4 << 10);
    assert_eq!(settings.server.weight, Some(2.0));
    assert_eq!(settings.workers[1].role, Role::Prefill);
    assert_eq!(settings.labels["x"], "1");
    let kwargs = serde_json::json!({"a": 1, "b": [true, null, "x"], "c": {"d": 1.5}});
    assert_eq!(serde_json::Value::Object(settings.kwargs), kwargs);
}

#[test]
fn an_unknown_key_is_reported_with_the_name_that_it_resembles() {
    check(
        "sever: {}",
        &["f:1:1: sever: unknown key `sever`; did you mean `server`?"],
    );
    check(
        "server:\n  Port: 1",
        &["f:2:3: server.Port: unknown key `Port`; did you mean `port`?"],
    );
    check(
        "quite-else: 1",
        &["f:1:1: quite-else: unknown key `quite-else`"],
    );
    check(
        "workers: [{url: a, 'b c': 1}]",
        &["f:1:20: workers[0][\"b c\"]: unknown key"],
    );
}

#[test]
fn a_value_of_the_wrong_type_is_reported_where_it_is() {
    check(
        "server: {port: high}",
        &["f:1:16: server.port: expected a whole number, found `high`"],
    );
    check(
        "server: {port: 65536}",
        &["f:1:16: server.port: must be from 1 to 65535, not `65536`"],
    );
    check(
        "server: {port: '80'}",
        &["f:1:16: server.port: expected a whole number, found `80`"],
    );
    check(
        "server: {port: 1.5}",
        &["f:1:16: server.port: expected a whole number, found `1.5`"],
    );
    check(
        "server: {is_open: yes}",
        &["f:1:19: server.is_open: expected `true` or `false`, found `yes`"],
    );
    check(
        "server: {timeout: 30}",
        &["f:1:19: server.timeout: expected a duration such as `30s`, found `30`"],
    );
    check(
        "server: {timeout: 999us}",
        &["f:1:19: server.timeout: must be at least 1ms, not `999us`"],
    );
    check(
        "server: {pause: 1ns}",
        &["f:1:17: server.pause: must be at least 1ms, not `1ns`"],
    );
    for (pause, millis) in [("0s", 0), ("1ms", 1)] {
        let settings = good(&format!("server: {{pause: {pause}}}"));
        assert_eq!(settings.server.pause.as_millis(), millis);
    }
    check(
        "server: {room: 2MiB}",
        &["f:1:16: server.room: must be at most 1MiB, not `2MiB`"],
    );
    check(
        "server: {disk: 1025TiB}",
        &["f:1:16: server.disk: must be at most 1024TiB, not `1025TiB`"],
    );
    check(
        "server: {disk: 16EiB}",
        &["f:1:16: server.disk: must be at most 1024TiB, not `16EiB`"],
    );
    check(
        "server: {room: 2048}",
        &["f:1:16: server.room: expected a size such as `64MiB`, found `2048`"],
    );
    check(
        "server: {weight: .inf}",
        &["f:1:18: server.weight: expected a number, found `.inf`"],
    );
    check(
        "server: 1",
        &["f:1:9: server: expected a map of keys and values, found `1`"],
    );
    check(
        "server:\nlabels: {}",
        &["f:1:1: server: expected a map of keys and values, found nothing"],
    );
    check(
        "server: []",
        &["f:1:9: server: expected a map of keys and values, found a list"],
    );
    check(
        "workers: {}",
        &["f:1:10: workers: expected a list, found a map"],
    );
    check(
        "server: {host: {}}",
        &["f:1:16: server.host: expected a text, found a map"],
    );
    check(
        "[1]",
        &["f:1:1: expected a map of keys and values, found a list"],
    );
    check(
        "7",
        &["f:1:1: expected a map of keys and values, found `7`"],
    );
}

#[test]
fn an_unknown_choice_is_reported_with_the_known_ones() {
    check(
        "workers: [{url: a, role: prefil}]",
        &[
            "f:1:26: workers[0].role: expected one of `both`, `prefill`, found `prefil`; did you mean `prefill`?",
        ],
    );
}

#[test]
fn a_missing_key_is_reported_at_its_map() {
    check(
        "workers:\n- {url: a}\n- {role: both}",
        &["f:3:3: workers[1]: the key `url` is missing"],
    );
}

#[test]
fn all_kinds_of_problems_in_one_file_come_together() {
    check(
        "server: {port: x, prt: 1}\nworkers: [{}, {url: [a]}]\nlabels: [a]\nsecret: file:/none\n",
        &[
            "f:1:16: server.port",
            "f:1:19: server.prt",
            "f:2:11: workers[0]",
            "f:2:21: workers[1].url",
            "f:3:9: labels",
            "f:4:9: secret: cannot read `/none`",
        ],
    );
}

#[test]
fn broken_yaml_is_reported_with_its_position() {
    check("server: [", &["f:1:9: unclosed bracket"]);
    check("server: {host: ${HOST}}", &["f:1:"]);
    check("a: 1\na: 2", &["f:2:1: key `a` is given twice"]);
    check("a: 1\n---\nb: 2", &["f:3:1: a second document starts here"]);
    check("server: {host: !x y}", &["f:1:"]);
    check("<<: {a: 1}", &["f:1:1: "]);
    check("a: *b", &["f:1:4: "]);
    let message = |text: &str| read(text.as_bytes()).unwrap_err().to_string();
    let open = message("workers: [http://a:1\nserver:\n  port: 1\n");
    assert!(
        open.ends_with("; is a bracket of line 1 not closed?"),
        "{open}"
    );
    let shifted = message("server:\n  port: 1\n host: h\n");
    let hint = "; does this line begin in the column of its neighbours?";
    assert!(shifted.ends_with(hint), "{shifted}");
    for unquoted in ["server: {host: ${HOST}}", "hosts: [${HOST}]"] {
        let hint = read(unquoted.as_bytes()).unwrap_err().to_string();
        assert!(hint.contains("needs quotes between braces"), "{hint}");
    }
}

#[test]
fn what_would_grow_without_bound_is_refused() {
    assert!(read(&[b'[', b'#'].repeat(1 << 20)).is_err());
    assert!(read("[".repeat(100_000).as_bytes()).is_err());
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for depth in 1..12 {
        let before = format!("*a{}, ", depth - 1).repeat(9);
        bomb += &format!("a{depth}: &a{depth} [{before}]\n");
    }
    assert!(read(bomb.as_bytes()).is_err());
    let many: String = (0..300).map(|key| format!("k{key}: 1\n")).collect();
    let problems = read(many.as_bytes()).unwrap_err().to_string();
    assert!(problems.ends_with("f: 200 more problems"), "{problems}");
}

#[test]
fn text_that_is_not_utf_8_is_reported_with_its_position() {
    let problems = read(b"a: 1\nb: \xff").unwrap_err().to_string();
    assert!(
        problems.starts_with("f:2:4: file is not UTF-8"),
        "{problems}"
    );
}

#[test]
fn variables_stand_for_any_value() {
    let host = |text: &str| good(&format!("server:\n  host: {text}\n")).server.host;
    assert_eq!(host("${HOST}"), "h");
    assert_eq!(host("a-${HOST}-${PORT}"), "a-h-9000");
    assert_eq!(host("${NONE:-d}"), "d");
    assert_eq!(host("${EMPTY:-d}"), "d");
    assert_eq!(host("$${HOST} $x $$"), "${HOST} $x $");
    assert_eq!(host("${PORT}"), "9000");
    let server = good("server:\n  port: ${PORT}\n  timeout: ${SIXTY}\n").server;
    assert_eq!((server.port, server.timeout.as_secs()), (9_000, 60));
    let unset = "f:2:9: server.host: environment variable `NONE` is not set";
    check("server:\n  host: ${NONE}\n", &[unset]);
    check(
        "server:\n  host: ${NO NE}\n",
        &["f:2:9: server.host: `NO NE` is not the name"],
    );
    check(
        "server:\n  host: ${HOST\n",
        &["f:2:9: server.host: `${` without `}`"],
    );
}

#[test]
fn secrets_come_from_text_variables_and_files_and_are_never_printed() {
    for text in [
        "secret: hunter2",
        "secret: ${HUSH}",
        "secret: file:/key",
        "secret: 'hunter2'",
    ] {
        let settings = good(text);
        assert_eq!(settings.secret.expose(), "hunter2");
        assert!(!to_yaml(&settings).unwrap().contains("hunter2"));
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
    assert_eq!(good("secret: 0123").secret.expose(), "0123");
    check("secret: file:/empty", &["f:1:9: secret: `/empty` is empty"]);
    check(
        "secret: [hunter2]",
        &["f:1:9: secret: expected a text, found a list"],
    );
    check(
        "secret:\n",
        &["f:1:1: secret: expected a text, found nothing"],
    );
}

#[test]
fn values_from_the_environment_are_not_shown() {
    check(
        "server:\n  port: ${HUSH}\n  timeout: ${HUSH}\n",
        &[
            "f:2:9: server.port: expected a whole number, found the value of `${HUSH}`",
            "f:3:12: server.timeout: expected a duration such as `30s`, found the value of `${HUSH}`",
        ],
    );
}

#[test]
fn where_files_may_be_missing_a_secret_without_its_file_is_noted_and_not_checked() {
    let outside = Outside {
        env: &env,
        read_file: &read_file,
        may_lack_files: true,
    };
    let text = b"secret: 'file:/none'\nworkers: [{url: a}]\n";
    let (mut reader, settings) = Reader::read::<Settings>("f", text, outside);
    reader.problem("secret", "is too short");
    reader.file_problem("workers[0].url", true, "`a` is missing");
    reader.file_problem("workers[0].role", false, "is none");
    let notes = reader.missing_files();
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[0].starts_with("f:1:9: secret: cannot read `/none`: "));
    assert!(notes[1].ends_with(": workers[0].url: `a` is missing"));
    // It counts as one that is set.
    assert!(!settings.as_ref().unwrap().secret.is_empty());
    let problems = reader.finish(settings).unwrap_err().to_string();
    let expected = ": workers[0].role: is none";
    assert!(problems.ends_with(expected), "{problems}");
    assert_eq!(problems.lines().count(), 1, "{problems}");

    let text = b"secret: 'file:/empty'\n";
    let (reader, settings) = Reader::read::<Settings>("f", text, outside);
    assert!(reader.finish(settings).is_err());
}

#[test]
fn a_later_check_names_the_nearest_position_that_the_file_has() {
    let text = b"server:\n  port: 1\nworkers:\n  - url: a\nlabels: 7\n";
    let outside = Outside {
        env: &env,
        read_file: &read_file,
        may_lack_files: false,
    };
    let (mut reader, settings) = Reader::read::<Settings>("f", text, outside);
    reader.problem("server.port", "one");
    reader.problem("server.timeout", "two");
    reader.problem("workers[0].role", "three");
    reader.problem("secret", "four");
    // A default was checked instead of what the file says.
    reader.problem("labels.x", "five");
    let problems = reader.finish(settings).unwrap_err().to_string();
    assert_eq!(
        problems,
        "f:1:1: secret: four\nf:2:3: server.timeout: two\nf:2:9: server.port: one\n\
         f:4:5: workers[0].role: three\nf:5:9: labels: expected a map of keys and values, found `7`"
    );
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
    }

    #[test]
    fn no_text_makes_it_panic(text in any::<String>()) {
        let _ = read(text.as_bytes());
        let _ = read(format!("server: {text}").as_bytes());
        let _ = read(format!("server:\n  host: '{text}'").as_bytes());
    }

    #[test]
    fn what_is_printed_reads_back_equal(
        host in any::<String>(), label in any::<String>(), port in 1..u16::MAX,
        millis in 1u64..10_000_000, weight in prop::option::of(-1e9..1e9),
    ) {
        // YAML has no form for some characters outside of quotes, and none for these at all.
        prop_assume!(!host.contains('\u{0}') && !label.contains('\u{0}'));
        let settings = Settings {
            server: Server {
                port,
                host: host.clone(),
                timeout: Duration::from_millis(millis),
                weight,
                ..Server::default()
            },
            labels: BTreeMap::from([(label, host)]),
            ..Settings::default()
        };
        let printed = to_yaml(&settings).unwrap();
        prop_assert_eq!(read(printed.as_bytes()).map_err(|problems| problems.to_string()), Ok(settings));
    }
}
