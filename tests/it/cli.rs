//! The command line: what it prints, and the codes it ends with.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Output, Stdio};

use warmroute::config::Config;
use warmroute::observe::Format;

use crate::cluster::{self, Engine, Removed, Router, eventually, fast};
use crate::patience::too_long;

const GOOD: &str = "workers:\n  - url: http://127.0.0.1:8000\n    api_key: hush\n";

fn warmroute(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(arguments)
        .output()
        .unwrap()
}

fn check(text: &str) -> (Removed, Output) {
    let file = Removed::new(text);
    let output = warmroute(&["check", "--config", file.0.to_str().unwrap()]);
    (file, output)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn nothing_is_said_when_the_reader_of_the_output_leaves() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["config", "schema"])
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn each_shell_completes_every_command() {
    let help = warmroute(&["--help"]);
    let commands = text(&help.stdout)
        .lines()
        .skip_while(|line| *line != "Commands:");
    let commands: Vec<&str> = commands
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            line.split_whitespace()
                .next()
                .filter(|_| line.starts_with("  ") && !line.starts_with("   "))
        })
        .collect();
    assert!(
        commands.contains(&"serve") && commands.len() > 8,
        "{commands:?}"
    );
    for shell in ["bash", "zsh", "fish"] {
        let output = warmroute(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        for command in &commands {
            assert!(text(&output.stdout).contains(command), "{shell} {command}");
        }
    }
    assert_eq!(warmroute(&["completions", "csh"]).status.code(), Some(64));
}

#[test]
fn wrong_arguments_are_a_usage_error() {
    for arguments in [
        &["nonsense"][..],
        &["serve"],
        &["serve", "--config"],
        &["check", "--nonsense"],
        &["sim", "--decode-time", "soon"],
        &["replay"],
        &["replay", "trace", "--policies", "cache_aware,fastest"],
        &["replay", "trace", "--speed", "0"],
        &["demo", "--replicas", "1"],
        &["demo", "--replicas", "2", "--disaggregated"],
        &["bridge", "--zmq", "tcp://127.0.0.1:5557"],
        &[
            "bridge",
            "--zmq",
            "127.0.0.1:5557",
            "--listen",
            "127.0.0.1:0",
        ],
        &[
            "bridge",
            "--zmq",
            "tcp://h:65535",
            "--ranks",
            "2",
            "--listen",
            "127.0.0.1:0",
        ],
        &[],
    ] {
        let output = warmroute(arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(text(&output.stderr).contains("--help"), "{arguments:?}");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    let version = warmroute(&["--version"]);
    assert_eq!(version.status.code(), Some(0));
    let expected = format!("warmroute {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&version.stdout), expected);
    for arguments in [
        &["--help"][..],
        &["serve", "--help"],
        &["bridge", "--help"],
        &["sim", "--help"],
        &["replay", "--help"],
    ] {
        let help = warmroute(arguments);
        assert_eq!(help.status.code(), Some(0), "{arguments:?}");
        assert!(text(&help.stdout).contains("Usage: "), "{arguments:?}");
    }
    let help = warmroute(&["--help"]);
    for command in ["serve", "check", "demo", "bridge", "sim", "replay"] {
        assert!(text(&help.stdout).contains(command), "{command}");
    }
}

#[test]
fn a_configuration_may_come_on_standard_input() {
    let check = |input: OwnedFd| {
        let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args(["check", "-"])
            .stdin(input)
            .output()
            .unwrap();
        let verdict = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{verdict}");
        assert!(verdict.contains("the configuration is valid"), "{verdict}");
    };
    // As through ssh: a socket, which no path opens.
    let (reader, mut writer) = UnixStream::pair().unwrap();
    writer.write_all(GOOD.as_bytes()).unwrap();
    drop(writer);
    check(reader.into());
    // Nothing of a file is known but its text: another file that takes its place would not be seen.
    let file = Removed::new(GOOD);
    check(File::open(&file.0).unwrap().into());
}

#[test]
fn a_bad_configuration_is_told_with_every_line_and_path() {
    let bad = "workers:\n  - url: ftp://x\nrequests:\n  max_attempts: 0\n  max_attemps: 3\nrouting:\n  policy: warmest\n";
    let (file, output) = check(bad);
    assert_eq!(output.status.code(), Some(78));
    assert!(output.stdout.is_empty());
    let problems = text(&output.stderr);
    let name = file.0.to_str().unwrap();
    for (line, path) in [
        (2, "workers[0].url"),
        (4, "requests.max_attempts"),
        (5, "requests.max_attemps"),
        (7, "routing.policy"),
    ] {
        let found = problems.lines().any(|problem| {
            problem.starts_with(&format!("{name}:{line}:")) && problem.contains(path)
        });
        assert!(found, "line {line}, {path}: {problems}");
    }
    let served = warmroute(&["serve", "--config", name]);
    assert_eq!(served.status.code(), Some(78));
    assert_eq!(text(&served.stderr), problems);
}

#[test]
fn values_out_of_range_are_told_together_once_all_can_be_read() {
    let bad = "workers:\n  - url: ftp://x\nrequests:\n  max_attempts: 0\nlog:\n  level: '='\n";
    let (file, output) = check(bad);
    assert_eq!(output.status.code(), Some(78));
    let problems = text(&output.stderr);
    let name = file.0.to_str().unwrap();
    for (line, path) in [
        (2, "workers[0].url"),
        (4, "requests.max_attempts"),
        (6, "log.level"),
    ] {
        let found = problems.lines().any(|problem| {
            problem.starts_with(&format!("{name}:{line}:")) && problem.contains(path)
        });
        assert!(found, "line {line}, {path}: {problems}");
    }
}

#[test]
fn a_configuration_that_is_not_there_or_empty_is_a_bad_one() {
    let output = warmroute(&["check", "--config", "/nonexistent/warmroute.yaml"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).starts_with("/nonexistent/warmroute.yaml: cannot be read"));
    let (_file, output) = check("");
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).contains("there are no workers"));
}

#[test]
fn what_check_prints_is_a_configuration_of_the_same_meaning_without_secrets() {
    let (_file, printed) = check(GOOD);
    assert_eq!(printed.status.code(), Some(0), "{}", text(&printed.stderr));
    assert!(!text(&printed.stdout).contains("hush"));
    let (_file, again) = check(text(&printed.stdout));
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    assert_eq!(text(&again.stdout), text(&printed.stdout));
}

#[test]
fn a_good_configuration_ends_with_one_line_that_says_so() {
    let (file, output) = check(GOOD);
    let verdict = text(&output.stderr);
    let expected = format!("{} is valid: workers 1, ", file.0.display());
    assert!(verdict.starts_with(&expected), "{verdict}");
    assert_eq!(verdict.lines().count(), 1, "{verdict}");
}

#[test]
fn check_warns_of_what_the_start_warns_of() {
    let tenants =
        "tenants: [{name: a, keys: [aaaaaaaaaaaaaaaa]}, {name: b, keys: [bbbbbbbbbbbbbbbb]}]\n";
    let (_file, output) = check(&format!("{GOOD}{tenants}"));
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let warning = "warning: tenants share prefix caches";
    assert!(printed.contains(warning), "{printed}");
}

#[test]
fn missing_files_are_noted_where_they_are_allowed_and_all_else_is_checked() {
    let missing = "admin: {listen: ':9', token: 'file:/no/token'}\n\
                   api: {tls: {certificate: /no/tls.crt, key: /no/tls.key}}\n\
                   models: [{name: m, tokenizer: /no/model}]\n\
                   usage: {log: /no/folder/usage.jsonl}\n";
    let (_file, output) = check(&format!("{GOOD}{missing}"));
    assert_eq!(output.status.code(), Some(78));
    assert_eq!(text(&output.stderr).lines().count(), 5);

    let allowed = |rest: &str| {
        let file = Removed::new(&format!("{GOOD}{missing}{rest}"));
        warmroute(&["check", "--allow-missing-files", file.0.to_str().unwrap()])
    };
    let output = allowed("");
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let notes = printed.lines().filter(|line| line.starts_with("note: "));
    assert_eq!(notes.count(), 5, "{printed}");
    let verdict = "is valid but for missing files (5): ";
    assert!(printed.contains(verdict), "{printed}");

    let output = allowed("requests: {max_attempts: 0}\n");
    let printed = text(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{printed}");
    assert!(printed.contains("requests.max_attempts: "), "{printed}");
    assert_eq!(printed.lines().count(), 1, "{printed}");
}

#[test]
fn flags_take_the_place_of_a_file_and_change_one() {
    let worker = "http://127.0.0.1:1";
    let output = warmroute(&["check", "--worker", worker, "--listen", "localhost:8123"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    assert!(
        printed.contains(worker) && printed.contains("localhost:8123"),
        "{printed}"
    );
    let file = Removed::new(GOOD);
    let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["check", "--worker", worker])
        .env("WARMROUTE_CONFIG", &file.0)
        .output()
        .unwrap();
    let printed = text(&output.stdout);
    assert!(
        printed.contains(worker) && printed.contains("http://127.0.0.1:8000"),
        "{printed}"
    );
    let output = warmroute(&["check", "--worker", "ftp://x"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).starts_with("--worker ftp://x: `ftp://x`"));
    let output = warmroute(&["check", "--worker", worker, "--admin-listen", "9091"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).starts_with("--admin-listen 9091: `9091` is not an address"));
    let output = warmroute(&["serve"]);
    assert!(text(&output.stderr).contains("give a configuration FILE"));
}

#[test]
fn two_files_are_refused_and_a_file_counts_before_the_environment() {
    let files = [Removed::new(GOOD), Removed::new(GOOD)];
    let [one, other] = files.each_ref().map(|file| file.0.to_str().unwrap());
    for command in ["check", "serve"] {
        let output = warmroute(&[command, "--config", one, other]);
        assert_eq!(output.status.code(), Some(64));
        assert!(text(&output.stderr).contains("give one configuration"));
    }
    let output = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["check", other])
        .env("WARMROUTE_CONFIG", one)
        .output()
        .unwrap();
    let printed = text(&output.stderr);
    assert!(printed.contains(other), "{printed}");
    assert_eq!(warmroute(&["check", "-c", one]).status.code(), Some(0));
}

#[test]
fn arguments_of_other_programs_get_a_tip() {
    let tip_of = |arguments: &[&str], expected: &str| {
        let output = warmroute(arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        let printed = text(&output.stderr);
        assert!(printed.contains(expected), "{printed}");
        assert!(!printed.contains("as a value"), "{printed}");
    };
    let serve = "tip: did you mean `warmroute serve --config x.yaml`?";
    tip_of(&["--config", "x.yaml"], serve);
    tip_of(&["x.yaml"], "`warmroute serve x.yaml`");
    tip_of(&["run"], "did you mean `serve`?");
    tip_of(&["serve", "x.yaml", "--port", "80"], "`api.listen`");
    tip_of(&["check", "x.yaml", "--nonsense"], "'--nonsense' found");
}

#[tokio::test]
async fn a_minimal_configuration_starts_without_a_warning() {
    let engines = [
        Engine::here("a", fast()).await,
        Engine::here("b", fast()).await,
    ];
    let mut config = Config {
        workers: engines.iter().map(Engine::listed).collect(),
        ..Config::default()
    };
    let quick = cluster::config();
    (config.api.listen, config.admin.listen) = (quick.api.listen, quick.admin.listen);
    config.log.format = Format::Json;
    let router = Router::child(&config).await;
    eventually("both workers are up", async || {
        router.log().matches("worker is up").count() == 2
    })
    .await;
    // Whether the bounds of memory fit depends on where the tests run.
    let (log, bounds) = (router.log(), "what is bounded in memory");
    let mut warnings = log.lines().filter(|line| line.contains("WARN"));
    assert!(warnings.all(|line| line.contains(bounds)), "{log}");
}

#[test]
fn the_reference_and_the_schema_are_printed() {
    let reference = warmroute(&["config", "reference"]);
    assert!(text(&reference.stdout).contains("| `api.listen` |"));
    let rows = warmroute(&["config", "reference", "admin.tls"]);
    let rows: Vec<&str> = text(&rows.stdout).lines().collect();
    assert!(rows.len() > 2, "{rows:?}");
    assert!(
        rows[2..].iter().all(|row| row.starts_with("| `admin.tls.")),
        "{rows:?}"
    );
    let none = warmroute(&["config", "reference", "nonsense"]);
    assert_eq!(none.status.code(), Some(1));
    let schema = warmroute(&["config", "schema"]);
    let schema: serde_json::Value = serde_json::from_slice(&schema.stdout).unwrap();
    assert!(schema["properties"]["workers"].is_object());
}

#[test]
fn a_port_in_use_is_told_with_its_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let _holds = std::net::TcpListener::bind(taken);
    for key in ["api", "admin"] {
        let other = if key == "api" { "admin" } else { "api" };
        let file = Removed::new(&format!(
            "{GOOD}{key}:\n  listen: {taken}\n{other}:\n  listen: 127.0.0.1:0\n"
        ));
        let output = warmroute(&["serve", "--config", file.0.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1));
        let errors = text(&output.stderr);
        assert!(errors.contains(&format!("{key}.listen")), "{errors}");
        assert!(errors.contains(&taken.to_string()), "{errors}");
    }
}

/// Three conversations of four turns each.
fn trace() -> Removed {
    let lines = (0..12).map(|request| {
        let (turn, user) = (request / 3, request % 3);
        let blocks: Vec<String> = (0..=turn)
            .map(|block| (100 * user + block).to_string())
            .collect();
        format!(
            "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": 20, \"hash_ids\": [{}]}}\n",
            request * 700,
            (turn + 1) * 512,
            blocks.join(", "),
        )
    });
    Removed::new(&lines.collect::<String>())
}

#[test]
fn a_replay_prints_a_table_and_writes_the_same_results_every_time() {
    let (trace, config) = (trace(), Removed::new(GOOD));
    let (json, plot) = (Removed::new(""), Removed::new(""));
    let path = |file: &Removed| file.0.to_str().unwrap().to_owned();
    let replay = || {
        let output = warmroute(&[
            "replay",
            &path(&trace),
            "--config",
            &path(&config),
            "--workers=3",
            "--routers=2",
            "--json",
            &path(&json),
            "--plot",
            &path(&plot),
        ]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let results = std::fs::read_to_string(&json.0).unwrap();
        let picture = std::fs::read_to_string(&plot.0).unwrap();
        (text(&output.stdout).to_owned(), results, picture)
    };
    let (table, results, picture) = replay();
    assert_eq!((table.clone(), results.clone(), picture.clone()), replay());
    assert!(picture.starts_with("<svg"));
    let results: serde_json::Value = serde_json::from_str(&results).unwrap();
    assert_eq!(results["trace"]["requests"], 12);
    for policy in results["policies"].as_array().unwrap() {
        assert!(
            table.contains(policy["policy"].as_str().unwrap()),
            "{table}"
        );
    }
    // Every turn finds all of the turn before.
    for (index, name) in ["cache_aware_queue", "cache_aware"].into_iter().enumerate() {
        let cache_aware = &results["policies"][index];
        assert_eq!(cache_aware["policy"], name);
        assert_eq!(cache_aware["cached_ratio"], 0.6, "{table}");
    }
}

#[test]
fn generated_loads_are_compared_policy_by_policy_and_the_same_every_time() {
    let json = Removed::new("");
    let compare = || {
        let output = warmroute(&[
            "replay",
            "--loads=agents 75,hot 500 x30 /64",
            "--policies=cache_aware,least_load",
            "--json",
            json.0.to_str().unwrap(),
        ]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let results = std::fs::read_to_string(&json.0).unwrap();
        (text(&output.stdout).to_owned(), results)
    };
    let (table, results) = compare();
    assert_eq!((table.clone(), results.clone()), compare());
    let results: serde_json::Value = serde_json::from_str(&results).unwrap();
    let loads = results["loads"].as_array().unwrap();
    assert_eq!(loads.len(), 2);
    for load in loads {
        assert!(table.contains(load["load"].as_str().unwrap()), "{table}");
        let policies = load["seeds"][0].as_array().unwrap();
        let cached = |policy: usize| policies[policy]["cached_ratio"].as_f64().unwrap();
        assert!(cached(0) > 0.5 && cached(1) > 0.1, "{load}");
    }
    let output = warmroute(&["replay", "--loads=nothing"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no load has a name with nothing"));
}

#[test]
fn a_trace_that_cannot_be_replayed_is_told_with_its_line() {
    let broken = Removed::new("{\"timestamp\": 0}\n");
    for (path, expected) in [
        (
            broken.0.to_str().unwrap(),
            "line 1: missing field `input_length`",
        ),
        ("/nonexistent/trace.jsonl", "/nonexistent/trace.jsonl: "),
        ("/dev/null", "has no requests"),
    ] {
        let output = warmroute(&["replay", path]);
        assert_eq!(output.status.code(), Some(1), "{path}");
        assert!(
            text(&output.stderr).contains(expected),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn the_demo_compares_replicas_that_share_with_some_that_do_not() {
    let size = "--users 4 --groups 2 --conversations 1 --turns 3 --workers 2 --system-tokens 200";
    let speed = "--answer-tokens 2 --reading-time 10ms --decode-time 1ms";
    let arguments = format!("demo --replicas 2 --exit {size} {speed}");
    let output = warmroute(&arguments.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    for row in [
        "one router ",
        "2 routers that share ",
        "2 routers that do not share ",
    ] {
        let mut lines = printed.lines().filter(|line| line.starts_with(row));
        let line = lines.next().unwrap_or_else(|| panic!("{row}: {printed}"));
        assert!(line.contains(" %") && line.ends_with(" ms"), "{line}");
    }
}

#[test]
fn a_service_manager_hears_when_the_router_listens_and_when_it_stops() {
    let file = Removed::new(
        "api: {listen: '127.0.0.1:0'}\nadmin: {listen: '127.0.0.1:0'}\nworkers: ['http://127.0.0.1:1']\n",
    );
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let manager = UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(too_long())).unwrap();
    let heard = || {
        let mut message = [0; 256];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length])
            .trim()
            .to_owned()
    };
    let mut router = Command::new(env!("CARGO_BIN_EXE_warmroute"))
        .args(["serve", file.0.to_str().unwrap()])
        .env("NOTIFY_SOCKET", &socket)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(heard(), "READY=1");
    // Ctrl-C: nobody has asked whether it is ready, so it waits for nobody.
    let pid = router.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(heard(), "STOPPING=1");
    assert_eq!(router.wait().unwrap().code(), Some(0));
}

#[test]
fn a_stop_signal_while_the_configuration_is_read_ends_the_router_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("config.yaml");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    for signal in ["-TERM", "-INT"] {
        let mut router = Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args(["serve", pipe.to_str().unwrap()])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // This returns once the router has opened its end, where it waits for a text that does not come.
        let writer = File::options().write(true).open(&pipe).unwrap();
        let pid = router.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status();
        assert!(sent.unwrap().success());
        assert_eq!(router.wait().unwrap().code(), Some(0), "{signal}");
        drop(writer);
    }
}

#[test]
fn an_output_of_errors_that_takes_nothing_changes_no_exit_code() {
    let file = Removed::new("workers: []\nlogg: {}\n");
    let path = file.0.to_str().unwrap();
    for command in ["serve", "check"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let ended = Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args([command, path])
            .stderr(full)
            .status()
            .unwrap();
        assert_eq!(ended.code(), Some(78), "{command}");
    }
}

#[test]
fn a_start_that_lacks_file_descriptors_names_what_could_not_start_and_the_limits() {
    let file = Removed::new(
        "api: {listen: '127.0.0.1:0'}\nadmin: {listen: '127.0.0.1:0'}\nworkers: ['http://127.0.0.1:1']\n\
         runtime: {threads: 64}\n",
    );
    let binary = env!("CARGO_BIN_EXE_warmroute");
    let limited = format!("ulimit -n 32 && exec {binary} serve {}", file.0.display());
    let output = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot start the thread `io-"), "{said}");
    assert!(said.contains("ulimit -n"), "{said}");
}
