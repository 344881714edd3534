//! A Kubernetes API server with the parts that discovery needs, and faults at a test's will.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::query::{Query, Selector};
use super::stream;

pub(super) type Body = BoxBody<Bytes, std::io::Error>;

pub(crate) const NAMESPACE: &str = "llm";

/// The groups and kinds that the server has: plural, kind, `apiVersion`, path.
pub(super) const KINDS: [(&str, &str, &str, &str); 3] = [
    ("pods", "Pod", "v1", "/api/v1"),
    (
        "endpointslices",
        "EndpointSlice",
        "discovery.k8s.io/v1",
        "/apis/discovery.k8s.io/v1",
    ),
    (
        "inferencepools",
        "InferencePool",
        "inference.networking.k8s.io/v1",
        "/apis/inference.networking.k8s.io/v1",
    ),
];

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Requests without one of these tokens are refused; none are asked for if it is empty.
    pub(crate) tokens: Vec<String>,
    /// Refused with 403: verb and plural.
    pub(crate) forbidden: Vec<(&'static str, &'static str)>,
    /// Each page of a list takes this long.
    pub(crate) list_delay: Duration,
    /// This page of a list, counted from 0, is answered with 500.
    pub(crate) failing_page: Option<usize>,
    /// A page after the first is answered with 410.
    pub(crate) continue_expires: bool,
    /// A watch from before the compaction gets the status 410, instead of 200 and an event of type ERROR.
    pub(crate) gone_as_status: bool,
    /// Watches end at once.
    pub(crate) ends_watches: bool,
    /// Each list and watch is answered with 429 and this Retry-After.
    pub(crate) retry_after: Option<u64>,
    /// Watches stay open and say nothing.
    pub(crate) mute: bool,
    /// Each list is answered with 503.
    pub(crate) unavailable: bool,
}

/// One change, as watches report it.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) plural: &'static str,
    pub(super) before: Option<Value>,
    pub(super) after: Option<Value>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) version: u64,
    /// Plural and name -> object. All are in one namespace.
    objects: BTreeMap<(&'static str, String), Value>,
    pub(super) changes: Vec<Change>,
    /// Changes up to this version cannot be watched any more.
    pub(super) compacted: u64,
    /// The rest of lists that were begun, by continue token.
    pages: BTreeMap<String, (u64, Vec<Value>)>,
    pub(super) faults: Faults,
    /// Verb and plural of each request that was let in.
    requests: Vec<(&'static str, &'static str)>,
}

pub(crate) struct FakeApi {
    pub(crate) address: SocketAddr,
    pub(super) shared: Arc<Shared>,
    server: Option<JoinHandle<()>>,
    tls: Option<TlsAcceptor>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Notifies watches of changes.
    pub(super) changed: watch::Sender<u64>,
    /// Watches and connections of an earlier number end.
    pub(super) epoch: watch::Sender<u64>,
}

impl std::fmt::Debug for FakeApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeApi").finish_non_exhaustive()
    }
}

impl FakeApi {
    pub(crate) async fn start() -> Self {
        Self::with_tls(None).await
    }

    pub(crate) async fn with_tls(tls: Option<TlsAcceptor>) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: watch::Sender::new(0),
            epoch: watch::Sender::new(0),
        });
        let mut api = Self {
            address: ([127, 0, 0, 1], 0).into(),
            shared,
            server: None,
            tls,
        };
        api.listen().await;
        api
    }

    /// Listens at the same address as before, if it was stopped.
    pub(crate) async fn listen(&mut self) {
        let mut bound = TcpListener::bind(self.address).await;
        while bound.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            bound = TcpListener::bind(self.address).await;
        }
        let listener = bound.unwrap();
        self.address = listener.local_addr().unwrap();
        let (shared, tls) = (self.shared.clone(), self.tls.clone());
        self.server = Some(tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (shared, tls) = (shared.clone(), tls.clone());
                tokio::spawn(async move {
                    let mut epoch = shared.epoch.subscribe();
                    let serving = async {
                        match tls {
                            None => serve(stream, shared.clone()).await,
                            Some(tls) => {
                                if let Ok(stream) = tls.accept(stream).await {
                                    serve(stream, shared.clone()).await;
                                }
                            }
                        }
                    };
                    tokio::select! {
                        () = serving => {}
                        _ = epoch.changed() => {}
                    }
                });
            }
        }));
    }

    /// Closes every connection, in the middle of what it carries.
    pub(crate) fn drop_connections(&self) {
        self.shared.epoch.send_modify(|epoch| *epoch += 1);
    }

    pub(crate) fn stop(&mut self) {
        self.server.take().unwrap().abort();
        self.drop_connections();
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.shared.state.lock().faults);
    }

    /// Creates or changes an object.
    pub(crate) fn put(&self, plural: &'static str, object: Value) {
        self.change(plural, object, true);
    }

    /// As [`Self::put`], with an event that no watch gets.
    pub(crate) fn put_unnoticed(&self, plural: &'static str, object: Value) {
        self.change(plural, object, false);
    }

    fn change(&self, plural: &'static str, mut object: Value, is_reported: bool) {
        let mut state = self.shared.state.lock();
        state.version += 1;
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let (_, kind, api_version, _) = KINDS.into_iter().find(|kind| kind.0 == plural).unwrap();
        object["kind"] = kind.into();
        object["apiVersion"] = api_version.into();
        let metadata = &mut object["metadata"];
        metadata["namespace"] = NAMESPACE.into();
        metadata["resourceVersion"] = state.version.to_string().into();
        let before = state.objects.get(&(plural, name.clone())).cloned();
        if metadata["uid"].is_null() {
            let known = before
                .as_ref()
                .map(|before| before["metadata"]["uid"].clone());
            metadata["uid"] = known.unwrap_or_else(|| format!("uid-{}", state.version).into());
        }
        state.objects.insert((plural, name), object.clone());
        self.report(&mut state, plural, before, Some(object), is_reported);
    }

    pub(crate) fn delete(&self, plural: &'static str, name: &str) {
        self.remove(plural, name, true);
    }

    /// As [`Self::delete`], with an event that no watch gets.
    pub(crate) fn delete_unnoticed(&self, plural: &'static str, name: &str) {
        self.remove(plural, name, false);
    }

    fn remove(&self, plural: &'static str, name: &str, is_reported: bool) {
        self.shared.delete(plural, name, is_reported);
    }

    fn report(
        &self,
        state: &mut State,
        plural: &'static str,
        before: Option<Value>,
        after: Option<Value>,
        is_reported: bool,
    ) {
        self.shared
            .report(state, plural, before, after, is_reported);
    }

    /// Forgets all changes so far: a watch from before cannot go on.
    pub(crate) fn compact(&self) {
        let mut state = self.shared.state.lock();
        // A version that no object has: also a watch that has seen everything is behind.
        state.version += 1;
        state.compacted = state.version;
        state.changes.clear();
    }

    /// How often something was asked for.
    pub(crate) fn count(&self, verb: &str, plural: &str) -> usize {
        let state = self.shared.state.lock();
        let requests = state.requests.iter();
        requests
            .filter(|request| **request == (verb, plural))
            .count()
    }
}

impl Drop for FakeApi {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.abort();
        }
        self.drop_connections();
    }
}

impl Shared {
    fn delete(&self, plural: &'static str, name: &str, is_reported: bool) -> Option<Value> {
        let mut state = self.state.lock();
        let mut gone = state.objects.remove(&(plural, name.to_owned()))?;
        state.version += 1;
        gone["metadata"]["resourceVersion"] = state.version.to_string().into();
        self.report(&mut state, plural, Some(gone.clone()), None, is_reported);
        Some(gone)
    }

    fn report(
        &self,
        state: &mut State,
        plural: &'static str,
        before: Option<Value>,
        after: Option<Value>,
        is_reported: bool,
    ) {
        if is_reported {
            let version = state.version;
            state.changes.push(Change {
                version,
                plural,
                before,
                after,
            });
            self.changed.send_replace(version);
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, shared: Arc<Shared>) {
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, std::io::Error>(answer(&shared, request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new();
    // A client that leaves is none of the test's concern.
    let _ = connection
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().trim_end_matches('/').to_owned();
    if let Some(page) = super::catalog::page(&path) {
        return json_answer(StatusCode::OK, &page);
    }
    let Some(query) = Query::of(&path, request.uri().query().unwrap_or_default()) else {
        return status(
            404,
            "NotFound",
            &format!("the server could not find {path}"),
        );
    };
    let verb = match (request.method(), query.is_watch, &query.name) {
        (&Method::GET, true, _) => "watch",
        (&Method::GET, false, None) => "list",
        (&Method::GET, false, Some(_)) => "get",
        (&Method::DELETE, ..) => "delete",
        _ => return status(405, "MethodNotAllowed", "the fake cannot do that"),
    };
    let faults = shared.state.lock().faults.clone();
    let header = request.headers().get("authorization");
    let header = header
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let is_known = |token: &String| header == format!("Bearer {token}");
    if !faults.tokens.is_empty() && !faults.tokens.iter().any(is_known) {
        return status(401, "Unauthorized", "Unauthorized");
    }
    let plural = query.plural;
    if faults.forbidden.contains(&(verb, plural)) {
        let message =
            format!("{plural} is forbidden: User \"sa\" cannot {verb} resource \"{plural}\"");
        return status(403, "Forbidden", &message);
    }
    shared.state.lock().requests.push((verb, plural));
    if let Some(seconds) = faults.retry_after {
        let mut refusal = status(429, "TooManyRequests", "please try again later");
        refusal.headers_mut().insert("retry-after", seconds.into());
        return refusal;
    }
    match (verb, &query.name) {
        ("watch", _) => stream::watch(shared, query, &faults),
        ("list", _) if faults.unavailable => status(503, "ServiceUnavailable", "etcd is away"),
        ("list", _) => list(shared, &query, &faults).await,
        ("delete", Some(name)) => match shared.delete(plural, name, true) {
            Some(gone) => json_answer(StatusCode::OK, &gone),
            None => status(404, "NotFound", &format!("{plural} \"{name}\" not found")),
        },
        (_, Some(name)) => {
            let found = shared
                .state
                .lock()
                .objects
                .get(&(plural, name.clone()))
                .cloned();
            match found {
                Some(object) => json_answer(StatusCode::OK, &object),
                None => status(404, "NotFound", &format!("{plural} \"{name}\" not found")),
            }
        }
        _ => status(405, "MethodNotAllowed", "the fake cannot do that"),
    }
}

async fn list(shared: &Shared, query: &Query, faults: &Faults) -> Response<Body> {
    let began = Instant::now();
    while began.elapsed() < shared.state.lock().faults.list_delay {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut state = shared.state.lock();
    let page_number = query.continue_token.as_ref().map_or(0, |token| {
        let number = token.rsplit('-').next();
        number.unwrap().parse::<usize>().unwrap()
    });
    if faults.failing_page == Some(page_number) {
        return status(500, "InternalError", "etcdserver: request timed out");
    }
    if page_number > 0 && faults.continue_expires {
        return status(410, "Expired", "the provided continue parameter is too old");
    }
    let (version, mut rest) = match &query.continue_token {
        // A list shows one version on all of its pages.
        Some(token) => match state.pages.remove(token) {
            Some(rest) => rest,
            None => return status(410, "Expired", "the provided continue parameter is unknown"),
        },
        None => {
            let objects = state.objects.iter();
            let of_kind = objects.filter(|((plural, _), _)| *plural == query.plural);
            let matching = of_kind
                .map(|(_, object)| object)
                .filter(|object| query.matches(object));
            (state.version, matching.cloned().collect())
        }
    };
    let limit = query.limit.unwrap_or(usize::MAX).min(rest.len());
    let remaining = rest.split_off(limit);
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if !remaining.is_empty() {
        let token = format!("{:016x}-{}", fastrand::u64(..), page_number + 1);
        metadata["remainingItemCount"] = remaining.len().into();
        metadata["continue"] = token.clone().into();
        state.pages.insert(token, (version, remaining));
    }
    let (_, kind, api_version, _) = KINDS
        .into_iter()
        .find(|kind| kind.0 == query.plural)
        .unwrap();
    let list = json!({
        "kind": format!("{kind}List"), "apiVersion": api_version, "metadata": metadata, "items": rest,
    });
    json_answer(StatusCode::OK, &list)
}

pub(super) fn json_answer(code: StatusCode, body: &Value) -> Response<Body> {
    let body = Full::from(body.to_string()).map_err(|never| match never {});
    let answer = Response::builder().status(code);
    let answer = answer.header("content-type", "application/json");
    answer.body(body.boxed()).unwrap()
}

/// A Status object with its own code.
pub(super) fn status_object(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    })
}

pub(super) fn status(code: u16, reason: &str, message: &str) -> Response<Body> {
    let body = status_object(code, reason, message);
    json_answer(StatusCode::from_u16(code).unwrap(), &body)
}

/// The names of all pods that a selector matches.
pub(crate) fn names(api: &FakeApi, selector: &str) -> BTreeSet<String> {
    let selector = Selector::parse(selector);
    let state = api.shared.state.lock();
    let pods = state
        .objects
        .iter()
        .filter(|((plural, _), _)| *plural == "pods");
    let matching = pods.filter(|(_, pod)| selector.matches(pod));
    matching.map(|((_, name), _)| name.clone()).collect()
}
