//! Lanes: side by side, each in order.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::socket::{Socket, id, is_last, kinds};
use crate::cluster::{Cluster, eventually, unhurried};

async fn slow() -> Cluster {
    Cluster::start(vec![unhurried()], |_| {}).await
}

/// The events of so many turns, by lane.
async fn turns(socket: &mut Socket, mut count: usize) -> BTreeMap<String, Vec<Value>> {
    let mut lanes: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    while count > 0 {
        let event = socket.event().await;
        count -= usize::from(is_last(event["type"].as_str().unwrap()));
        let lane = event.get("stream_id").map_or("", |id| id.as_str().unwrap());
        lanes.entry(lane.to_owned()).or_default().push(event);
    }
    lanes
}

#[tokio::test]
async fn lanes_run_side_by_side_and_name_each_of_their_events() {
    let cluster = slow().await;
    let mut socket = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    for lane in ["a", "b", "c"] {
        socket
            .create(json!({"stream_id": lane, "max_output_tokens": 20}))
            .await;
    }
    socket.create(json!({"max_output_tokens": 20})).await;
    eventually("all run", async || {
        cluster.engines[0].stats().await.running == 4
    })
    .await;
    cluster.engines[0].let_go().await;
    let lanes = turns(&mut socket, 4).await;
    let names: Vec<&str> = lanes.keys().map(String::as_str).collect();
    assert_eq!(names, ["", "a", "b", "c"]);
    for events in lanes.values() {
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        let last = events.last().unwrap();
        let first = &events[0];
        assert_eq!(last["response"]["id"], first["response"]["id"]);
    }
}

#[tokio::test]
async fn a_lane_runs_its_turns_one_after_the_other() {
    let cluster = slow().await;
    let mut socket = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    for _ in 0..3 {
        socket
            .create(json!({"stream_id": "a", "max_output_tokens": 10}))
            .await;
    }
    cluster.engines[0].let_go().await;
    let events = turns(&mut socket, 3).await.remove("a").unwrap();
    let mut numbers = events
        .iter()
        .map(|event| event["sequence_number"].as_u64().unwrap());
    let firsts = numbers.by_ref().filter(|number| *number == 0).count();
    assert_eq!(firsts, 3);
    let mut expected = 0;
    for event in &events {
        assert_eq!(event["sequence_number"], expected);
        expected = if is_last(event["type"].as_str().unwrap()) {
            0
        } else {
            expected + 1
        };
    }
}

#[tokio::test]
async fn sixteen_turns_run_at_a_time() {
    let cluster = slow().await;
    let mut socket = Socket::open(cluster.router.api).await;
    cluster.engines[0].hold_after(3).await;
    for lane in 0..20 {
        let lane = format!("lane-{lane}");
        socket
            .create(json!({"stream_id": lane, "max_output_tokens": 30}))
            .await;
    }
    eventually("16 run", async || {
        cluster.engines[0].stats().await.running == 16
    })
    .await;
    cluster.engines[0].let_go().await;
    let lanes = turns(&mut socket, 20).await;
    assert_eq!(lanes.len(), 20);
}

#[tokio::test]
async fn the_lane_after_the_thirty_second_is_refused() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    for lane in 0..32 {
        socket
            .respond(json!({"stream_id": format!("l{lane}"), "generate": false}))
            .await;
    }
    let error = socket.fail(json!({"stream_id": "l32"})).await;
    assert_eq!(error["error"]["code"], "websocket_stream_limit_reached");
    assert_eq!(error["stream_id"], "l32");
    socket.respond(json!({"stream_id": "l0"})).await;
    let name = "warmroute_websocket_limits_reached_total";
    assert_eq!(cluster.metric(name, &["bound=\"lanes\""]).await, 1.0);
}

#[tokio::test]
async fn a_fork_keeps_its_parent_while_the_parents_lane_moves_on() {
    let cluster = slow().await;
    let mut socket = Socket::open(cluster.router.api).await;
    let parent = socket
        .respond(json!({"stream_id": "a", "store": false}))
        .await;
    let fork = json!({"stream_id": "b", "store": false, "previous_response_id": id(&parent),
        "max_output_tokens": 40});
    socket.create(fork.clone()).await;
    let next = json!({"stream_id": "a", "store": false, "previous_response_id": id(&parent)});
    socket.create(next.clone()).await;
    let lanes = turns(&mut socket, 2).await;
    for events in lanes.values() {
        let last = events.last().unwrap();
        assert_eq!(
            last["response"]["previous_response_id"],
            id(&parent),
            "{last}"
        );
    }
    let error = socket.fail(fork).await;
    assert_eq!(error["error"]["code"], "previous_response_not_found");
}

#[tokio::test]
async fn the_events_of_a_turn_that_generates_nothing_come_before_the_answer_to_the_next_one() {
    let cluster = Cluster::fast(1).await;
    let mut socket = Socket::open(cluster.router.api).await;
    let frame = |member: &str| {
        let mut frame =
            json!({"type": "response.create", "model": "sim", "input": "hello", "stream_id": "a"});
        frame[member] = json!(false);
        frame.to_string()
    };
    socket.texts(&[frame("generate"), frame("stream")]).await;
    let mut events = socket.turn().await;
    events.extend(socket.turn().await);
    let expected = [
        "response.created",
        "response.in_progress",
        "response.completed",
        "error",
    ];
    assert_eq!(kinds(&events), expected);
}
