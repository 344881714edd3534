//! What lies in Redis is read and changed by releases that run side by side, or one after the other. An expectation that no
//! longer holds here is a record that the release before cannot read, or takes for another one.

use warmroute::store::log::LogState;
use warmroute::store::record::Background;
use warmroute::store::{History, Item, ItemsOutcome, TakenOver, Takeover, Turn, WriteOutcome};

use super::*;

/// Names of 16 letters: a chain is written as the bytes of its ids, and an argument of `redis-cli` has no zero.
const FIRST: [u8; 16] = *b"the_first_answer";
const SECOND: [u8; 16] = *b"the_second_reply";

fn key(own: [u8; 16]) -> ResponseKey {
    ResponseKey {
        tenant: tenant(),
        id: ResponseId::new(Root(2), u128::from_be_bytes(own)),
    }
}

fn name(kind: &str, own: [u8; 16]) -> String {
    let own = u128::from_be_bytes(own);
    format!("wr:{kind}:{{0000000000000abc:0000000000000002}}:{own:032x}")
}

/// Writes [`finished`] as any release does, and these fields, of which the last of a name counts.
fn write(server: &Server, own: [u8; 16], more: &[&str]) {
    let name = name("r", own);
    let fields = [
        "hset",
        name.as_str(),
        "v",
        "1",
        "tk",
        "t",
        "st",
        "completed",
        "hi",
        r#"["model","worker \"7\""]"#,
        "il",
        "10",
        "ol",
        "11",
        "in",
        r#"r[{"in":1}]"#,
        "re",
        r#"r{"id":"r"}"#,
        "ou",
        r#"r[{"out":1}]"#,
    ];
    server.cli(&[&fields[..], more].concat());
}

#[tokio::test]
async fn a_chain_that_another_release_has_written_is_read() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    write(&server, FIRST, &[]);
    // A newer release may add fields.
    let chain = ["pa", "the_first_answer", "pb", "21", "zz", "added"];
    write(&server, SECOND, &chain);
    let record = store.get(key(SECOND)).await.unwrap().unwrap();
    let written = finished();
    assert_eq!(
        (record.status, record.hint, record.content),
        (Status::Completed, hint(), written.content.clone())
    );
    assert_eq!(record.previous, Some(key(FIRST).id));
    assert_eq!(record.background, None);
    let History::Found(found) = store.history(key(SECOND), ANY).await.unwrap() else {
        panic!("not found");
    };
    let turn = Turn {
        input: written.input,
        output: written.content.output,
    };
    assert_eq!(found.turns, [turn.clone(), turn]);
    assert_eq!(*found.chain.ids, [FIRST, SECOND].map(|own| key(own).id));
    assert_eq!(found.chain.bytes, 42);
}

#[tokio::test]
async fn a_run_that_another_release_has_begun_is_read_taken_over_and_ended() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let run = [
        "st",
        "in_progress",
        "bg",
        "1",
        "own",
        "000000000000000a",
        "ep",
        "1",
        "at",
        "1",
        "sm",
        "1",
        "rt",
        "s",
        "sq",
        "1",
        "lb",
        "13",
        "bn",
        "1",
        "rq",
        r#"r{"request":1}"#,
    ];
    write(&server, FIRST, &run);
    // Release 0.2 wrote no tokens; a newer one may add fields.
    let log = name("e", FIRST);
    server.cli(&["xadd", &log, "1-0", "f", "0", "b", "0..=0"]);
    let newer = [
        "xadd",
        log.as_str(),
        "2-0",
        "f",
        "1",
        "b",
        "1..=1",
        "t",
        "ids",
        "z",
        "added",
    ];
    server.cli(&newer);
    let own = u128::from_be_bytes(FIRST);
    let member = format!("0000000000000abc:0000000000000002:{own:032x}");
    server.cli(&["sadd", "wr:q:000000000000000a", &member]);
    server.cli(&["zadd", "wr:owners", "0", "000000000000000a"]);
    let (key, last_event) = (key(FIRST), Some(1));
    let background = Background {
        owner: Some(OWNER),
        fencing_number: 1,
        attempts: 1,
        retention: Retention::Stored,
        streams: true,
        last_event,
    };
    let record = store.get(key).await.unwrap().unwrap();
    assert_eq!(record.background, Some(background));
    let request = store.request(key).await.unwrap();
    assert_eq!(request, Some(Bytes::from_static(b"{\"request\":1}")));
    let read = store
        .events_with_tokens(key, None, 999)
        .await
        .unwrap()
        .unwrap();
    let last = EventBatch {
        tokens: Bytes::from_static(b"ids"),
        ..batch(1, 1)
    };
    assert_eq!(read.batches, [batch(0, 0), last]);
    assert_eq!((read.last, read.log), (last_event, LogState::Whole));
    let orphans = store.orphans(9).await.unwrap();
    assert_eq!(orphans.len(), 1);
    let fence = FencingToken {
        owner: OTHER,
        number: 2,
    };
    let taken_over = TakenOver {
        fence,
        status: Status::InProgress,
        attempts: 2,
        lost_owners: 1,
        streams: true,
        last_event,
    };
    let outcome = store.take_over(orphans[0], OTHER).await.unwrap();
    assert_eq!(outcome, Takeover::Done(taken_over));
    let mut end = ending(Status::Completed);
    end.batch = Some(batch(2, 2));
    let ended = store.finalize(key, fence, end).await.unwrap();
    assert_eq!(ended, WriteOutcome::Done);
}

#[tokio::test]
async fn a_conversation_that_another_release_has_written_is_read() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    let object = r#"r{"conversation":1}"#;
    let [conversation, items, order] = ["c", "i", "x"].map(|kind| name(kind, FIRST));
    let fields = [
        "v", "1", "tk", "t", "ob", object, "nx", "2", "by", "14", "zz", "added",
    ];
    let head = ["hset", conversation.as_str()];
    server.cli(&[&head[..], &fields[..]].concat());
    let packed = ["i:msg_0", r#"7:r{"n":0}"#, "i:msg_1", r#"7:r{"n":1}"#];
    let head = ["hset", items.as_str()];
    server.cli(&[&head[..], &packed[..]].concat());
    server.cli(&["zadd", &order, "0", "msg_0", "1", "msg_1"]);
    let key = ConversationKey {
        tenant: tenant(),
        id: ConversationId::new(Root(2), u128::from_be_bytes(FIRST)),
    };
    let found = store.conversation(key).await.unwrap();
    assert_eq!(found, Some(Bytes::from_static(br#"{"conversation":1}"#)));
    let item = |number: usize| Item {
        id: format!("msg_{number}").into(),
        json: format!("{{\"n\":{number}}}").into(),
    };
    let found = ItemsOutcome::Found {
        items: vec![item(0), item(1)],
        has_more: false,
    };
    assert_eq!(store.all_items(key, 99).await.unwrap(), found);
}

/// Releases that run beside this one find each of them, and none that they would have to know.
#[tokio::test]
async fn a_record_has_the_fields_that_the_release_before_reads() {
    let server = Server::start().await;
    let store = open(&at(&server), &keep());
    store.create(key(FIRST), finished()).await.unwrap();
    store.create(key(SECOND), queued()).await.unwrap();
    for (own, expected) in [
        (FIRST, "hi il in ol ou re st tk v"),
        (SECOND, "at bg ep hi il in ol ou own re rq rt sm sq st tk v"),
    ] {
        let found = server.cli(&["hkeys", &name("r", own)]);
        let mut fields: Vec<&str> = found.split_whitespace().collect();
        fields.sort_unstable();
        assert_eq!(fields.join(" "), expected);
        assert_eq!(server.cli(&["hget", &name("r", own), "v"]).trim(), "1");
    }
}
