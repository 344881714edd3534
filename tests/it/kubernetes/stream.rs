//! The fake API server's watches.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::fake::{Body, Change, Faults, KINDS, Shared, status, status_object};
use super::query::Query;

/// A real server sends one about each minute.
const BOOKMARK_INTERVAL: Duration = Duration::from_millis(100);

/// Lines of a body.
struct Lines(mpsc::Receiver<Value>);

impl futures_core::Stream for Lines {
    type Item = std::io::Result<Frame<Bytes>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let line = self.0.poll_recv(context);
        line.map(|line| line.map(|line| Ok(Frame::data(format!("{line}\n").into()))))
    }
}

/// Answers at once, and reports changes for as long as the client stays.
pub(super) fn watch(shared: &Arc<Shared>, query: Query, faults: &Faults) -> Response<Body> {
    let from = query.resource_version.unwrap_or(0);
    let is_gone = from < shared.state.lock().compacted;
    if is_gone && faults.gone_as_status {
        return status(410, "Expired", "too old resource version");
    }
    let (lines, received) = mpsc::channel(16);
    let ends_at_once = faults.ends_watches;
    let (shared, is_mute) = (shared.clone(), faults.mute);
    tokio::spawn(async move {
        if ends_at_once {
            return;
        }
        if is_gone {
            let gone = status_object(410, "Expired", "too old resource version");
            let _ = lines.send(json!({"type": "ERROR", "object": gone})).await;
            return;
        }
        let limit = Duration::from_secs(query.timeout_seconds.unwrap_or(3_600));
        tokio::select! {
            _ = tokio::time::timeout(limit, report(&shared, &query, from, is_mute, &lines)) => {}
            () = lines.closed() => {}
        }
    });
    let body = StreamBody::new(Lines(received));
    let answer = Response::builder().status(StatusCode::OK);
    let answer = answer.header("content-type", "application/json");
    answer.body(BodyExt::boxed(body)).unwrap()
}

async fn report(
    shared: &Shared,
    query: &Query,
    from: u64,
    is_mute: bool,
    lines: &mpsc::Sender<Value>,
) -> Option<()> {
    let mut changed = shared.changed.subscribe();
    let mut sent = from;
    loop {
        let (events, version) = {
            let state = shared.state.lock();
            let new = state.changes.iter().filter(|change| change.version > sent);
            let events: Vec<Value> = new.filter_map(|change| event(change, query)).collect();
            (events, state.version)
        };
        for event in events {
            if !is_mute {
                lines.send(event).await.ok()?;
            }
        }
        let (_, kind, api_version, _) = KINDS.into_iter().find(|kind| kind.0 == query.plural)?;
        tokio::select! {
            _ = changed.changed() => {}
            () = tokio::time::sleep(BOOKMARK_INTERVAL), if query.allows_bookmarks && version > sent => {
                let metadata = json!({"resourceVersion": version.to_string()});
                let object = json!({"kind": kind, "apiVersion": api_version, "metadata": metadata});
                if !is_mute {
                    lines.send(json!({"type": "BOOKMARK", "object": object})).await.ok()?;
                }
            }
        }
        sent = version;
    }
}

/// What a watch with this query says of a change: an object that stops to match is gone for it.
fn event(change: &Change, query: &Query) -> Option<Value> {
    if change.plural != query.plural {
        return None;
    }
    let matching = |object: &Option<Value>| object.clone().filter(|object| query.matches(object));
    let (before, after) = (matching(&change.before), matching(&change.after));
    let (kind, mut object) = match (before, after) {
        (None, None) => return None,
        (None, Some(after)) => ("ADDED", after),
        (Some(_), Some(after)) => ("MODIFIED", after),
        (Some(before), None) => ("DELETED", before),
    };
    object["metadata"]["resourceVersion"] = change.version.to_string().into();
    Some(json!({"type": kind, "object": object}))
}
