//! Events that engines send and that gRPC has no message for, and starts that are gone.

use super::*;
use crate::http::grpc::frame;
use crate::kv::event::{Location, Medium};
use crate::kv::protobuf::{Service, encode_request};

#[tokio::test]
async fn a_placeholder_is_left_out_and_counted_and_its_rank_served() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1]).await;
    // As default CPU offloading reports its copies.
    let placeholder = Event::Stored(Stored {
        hashes: vec![EngineHash(1)],
        location: Location {
            medium: Medium::Cpu,
            ..Location::default()
        },
        ..Stored::default()
    });
    let sparse = Event::Stored(Stored {
        hashes: vec![EngineHash(8)],
        token_ids: vec![8, 9],
        block_size: 1,
        ..Stored::default()
    });
    engine.publish(vec![placeholder, store(&[2]), sparse]);
    engine.store(&[3]);
    router.until_live_with(&[1, 2, 3]).await;
    assert!(router.lost.is_empty(), "{:?}", router.lost);
    let metrics = get(&bridge, "/metrics").await;
    for reason in ["no_tokens", "inconsistent_fields"] {
        let line =
            format!("warmroute_bridge_left_out_events_total{{rank=\"0\",reason=\"{reason}\"}} 1");
        assert!(metrics.contains(&line), "{metrics}");
    }
    // A late subscriber learns that the snapshot lacks a block.
    let mut late = Router::new(&bridge);
    late.until(stream::State::Partial, &[1, 2, 3]).await;
}

#[tokio::test]
async fn an_event_that_may_have_removed_anything_starts_over_and_the_rank_is_served() {
    let (engine, bridge) = bridge("").await;
    engine.store(&[1]);
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1]).await;
    engine.publish(vec![Event::Unknown {
        kind: "Sparse".into(),
        hashes: None,
    }]);
    engine.store(&[2]);
    router.until(stream::State::Partial, &[2]).await;
    assert!(router.lost[0].contains("Sparse"), "{:?}", router.lost);
}

#[tokio::test]
async fn a_start_that_is_gone_is_refused_in_the_trailers_alone() {
    let (engine, bridge) = bridge("--history-batches-max 2").await;
    for name in 1..6 {
        engine.store(&[name]);
    }
    let mut router = Router::new(&bridge);
    router.until_live_with(&[1, 2, 3, 4, 5]).await;
    let path = Service::Vllm.path();
    let body = frame(&encode_request(7));
    let request = Request::post(format!("http://x{path}"))
        .header("content-type", "application/grpc")
        .body(full(body))
        .unwrap();
    let stream = TcpStream::connect(bridge.address()).await.unwrap();
    let shaken =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.unwrap();
    tokio::select! {
        answer = sender.send_request(request) => {
            let answer = answer.unwrap();
            // Trailers-only: the status is in the only header block. Clients that see headers first retry for ever.
            assert_eq!(answer.headers()["grpc-status"], "11");
            let body = http_body_util::BodyExt::collect(answer.into_body()).await.unwrap();
            assert!(body.trailers().is_none());
            assert!(body.to_bytes().is_empty());
        }
        ended = connection => panic!("{ended:?}"),
    }
}
