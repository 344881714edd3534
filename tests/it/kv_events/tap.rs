//! `warmroute kv tap`: one engine's events, to be read.

use std::io::BufRead;
use std::io::BufReader;
use std::process::ChildStdout;
use std::process::Command;

use serde_json::Value;
use warmroute::sim::worker::Settings;

use super::followed::Prompt;
use crate::cluster::Engine;
use crate::cluster::Killed;
use crate::cluster::telling;

const PROGRAM: &str = env!("CARGO_BIN_EXE_warmroute");

fn tap(engine: &Engine, more: &[&str]) -> (Killed, BufReader<ChildStdout>) {
    let first = &engine.events[0];
    let mut command = Command::new(PROGRAM);
    command
        .args(["kv", "tap"])
        .args(["--zmq", &format!("tcp://{}", first.events)])
        .args(["--replay", &format!("tcp://{}", first.replay.unwrap())])
        .args(more);
    Killed::start(&mut command)
}

/// Reads up to a line that has all of these. The engine is another process, so waiting here is no harm.
fn until(lines: &mut impl BufRead, wanted: &[&str]) -> Vec<String> {
    let mut read = Vec::new();
    for line in lines.lines() {
        let line = line.unwrap();
        let is_it = wanted.iter().all(|wanted| line.contains(wanted));
        read.push(line);
        if is_it {
            return read;
        }
    }
    panic!("it ended before {wanted:?}: {read:#?}");
}

fn adapters() -> Settings {
    Settings {
        models: vec!["sim".to_owned(), "sql".to_owned()],
        ..telling()
    }
}

#[tokio::test]
async fn a_tap_prints_what_an_engine_tells_and_told() {
    let engine = Engine::child("w0", &adapters());
    Prompt::new(1, 40).to(&engine).await;
    let (_tap, mut lines) = tap(&engine, &[]);
    let read = until(&mut lines, &["-- replay: that was the one batch"]);
    assert!(read[0].ends_with("-- connected: subscribed"), "{read:#?}");
    let kept = [
        "  kept  rank 0  #0 ",
        "stored      2 blocks 32 tokens ",
        " from the start",
    ];
    assert!(kept.iter().all(|kept| read[1].contains(kept)), "{read:#?}");
    assert_eq!(read.len(), 3, "{read:#?}");

    let adapter = Prompt {
        model: "sql",
        ..Prompt::new(1, 20)
    };
    adapter.to(&engine).await;
    until(
        &mut lines,
        &["  live  rank 0  #1 ", "1 block 16 tokens", "lora sql"],
    );
    Prompt::new(1, 56).to(&engine).await;
    until(&mut lines, &["  live  rank 0  #2 ", "stored", " after "]);
    engine.reset().await;
    Prompt::new(2, 20).to(&engine).await;
    until(&mut lines, &["  live  rank 0  #3 ", "cleared  all blocks"]);
    drop(engine);
    until(&mut lines, &["-- lost: ", "Connecting again"]);
    until(&mut lines, &["-- waiting: tcp://127.0.0.1:"]);
}

#[tokio::test]
async fn a_tap_prints_json_when_asked_to() {
    let engine = Engine::child("w0", &telling());
    Prompt::new(1, 40).to(&engine).await;
    let (_tap, mut lines) = tap(&engine, &["--json"]);
    let mut read = until(&mut lines, &["\"replay\""]);
    Prompt::new(1, 56).to(&engine).await;
    read.extend(until(&mut lines, &["\"live\""]));
    let read: Vec<Value> = read
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = read.iter().map(|it| it["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["connected", "stored", "replay", "stored"]);
    let hashes: Vec<String> = engine
        .truth(0)
        .await
        .held
        .iter()
        .map(|held| format!("{:016x}", held.hash.0))
        .collect();
    let told = [&read[1], &read[3]].into_iter();
    let mut told: Vec<&str> = told
        .flat_map(|it| it["names"].as_array().unwrap())
        .map(|name| name.as_str().unwrap())
        .collect();
    assert_eq!(read[3]["parent"], told[1]);
    assert_eq!(
        (&read[1]["number"], &read[3]["number"]),
        (&0.into(), &1.into())
    );
    told.sort_unstable();
    assert_eq!(told, hashes);
}

#[test]
fn a_tap_of_nonsense_says_what_is_wrong() {
    for (arguments, expected) in [
        (&[][..], "--zmq"),
        (&["--zmq", "127.0.0.1:5557"], "tcp://HOST:PORT"),
        (&["--zmq", "tcp://127.0.0.1:0"], "tcp://HOST:PORT"),
        (
            &["--zmq", "tcp://h:1", "--replay", "h:2"],
            "tcp://HOST:PORT",
        ),
        (&["--zmq", "tcp://h:1", "--jason"], "--json"),
    ] {
        let mut command = Command::new(PROGRAM);
        let output = command
            .args(["kv", "tap"])
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}
