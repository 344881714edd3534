use std::cell::Cell;
use std::num::NonZeroU32;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use hyper::Uri;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::*;
use crate::fleet::in_flight::InFlight;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::load::{LoadReport, LoadShare};
use crate::fleet::registry::Registry;
use crate::fleet::registry::tests::{bring_up, member, registry};
use crate::fleet::{Member, Role, Worker};
use crate::http::drain::Tasks;
use crate::ids::{ClientKey, RequestId};
use crate::kv::indexes::PrefixIndexes;
use crate::kv::predicted::{self, PredictedIndex};
use crate::kv::subscriber::StatusBoard;
use crate::kv::tokenizer_check::TokenizerCheck;
use crate::kv::unconfirmed::{self, UnconfirmedBlocks};
use crate::observe::metrics;
use crate::peers::Peers;
use crate::peers::routed::RoutedPrompts;
use crate::prompt::{Api, peek};
use crate::relay::account::usage::Usage;
use crate::relay::prompt::tokens::{self, Tokens};
use crate::relay::request::context::RequestContext;
use crate::relay::{
    Caches, EnteringLines, ModelSettings, PerModel, RunningLines, TenantTable, prefill_decode,
};
use crate::routing::{self, Policy};

/// Without this two requests would be released for the room of one.
#[test]
fn a_released_request_counts_in_the_queue_until_its_attempt_counts_at_the_worker() {
    let (grant, granted) = Grant::of_tokens(100);
    let at_worker = Cell::new(0);
    let (answer, answered) = oneshot::channel();
    let attempt = pin!(async {
        assert_eq!(granted(), 100, "it counts nowhere when its attempt begins");
        at_worker.set(100);
        answered.await.unwrap()
    });
    let mut running = pin!(with_grant(Some(Box::new(grant)), None, attempt));
    let mut context = Context::from_waker(Waker::noop());
    assert_eq!(granted(), 100);
    assert!(running.as_mut().poll(&mut context).is_pending());
    // From here on it counts once, at the worker.
    assert_eq!((granted(), at_worker.get()), (0, 100));
    answer.send("answer").unwrap();
    assert_eq!(running.as_mut().poll(&mut context), Poll::Ready("answer"));
    assert_eq!(granted(), 0);
}

#[test]
fn a_released_request_that_is_never_sent_gives_its_room_back() {
    let (grant, granted) = Grant::of_tokens(100);
    drop(with_grant(
        Some(Box::new(grant)),
        None,
        std::future::pending::<()>(),
    ));
    assert_eq!(granted(), 0);
    let (grant, granted) = Grant::of_tokens(7);
    let mut context = Context::from_waker(Waker::noop());
    let mut at_once = pin!(with_grant(
        Some(Box::new(grant)),
        None,
        std::future::ready(1)
    ));
    assert_eq!(at_once.as_mut().poll(&mut context), Poll::Ready(1));
    assert_eq!(granted(), 0);
}

const MODEL: &str = "m";

/// Of each worker. Beside people, lines are let in while two stay free.
const SLOTS: u32 = 16;

fn fleet(workers: &[(&str, Role)]) -> Arc<Registry> {
    let fleet = registry(&[]);
    let members = workers.iter().map(|(name, role)| Member {
        role: *role,
        slots: NonZeroU32::new(SLOTS),
        ..member(name)
    });
    fleet.set_members("static", members.collect());
    bring_up(&fleet, MODEL);
    fleet
}

fn worker(fleet: &Registry, name: &str) -> Arc<Worker> {
    let snapshot = fleet.snapshot();
    let mut workers = snapshot.workers.iter().map(|status| &status.worker);
    let found = workers.find(|worker| &*worker.name == name);
    found.unwrap().clone()
}

/// A relay that chooses the worker with the fewest requests.
fn relay(fleet: &Arc<Registry>, connector: Option<Connector>, queue: Option<Settings>) -> Relay {
    let metrics = metrics::Registry::default();
    let predicted = Arc::new(PredictedIndex::new(
        predicted::Settings::default(),
        predicted::Metrics::new(&metrics),
        observe::now(),
    ));
    let unconfirmed = UnconfirmedBlocks::new(
        unconfirmed::Settings::default(),
        unconfirmed::Metrics::new(&metrics),
    );
    let (tokenizer_check, _) = TokenizerCheck::new(Default::default(), &metrics);
    let routed = RoutedPrompts::new(16, predicted.clone(), unconfirmed.clone(), &metrics);
    let caches = Caches {
        indexes: PrefixIndexes::new(Default::default(), &metrics),
        board: Arc::new(StatusBoard::default()),
        unconfirmed,
        predicted,
        tokenizer_check,
        routed: Arc::new(routed),
    };
    let models = ModelSettings {
        common: PerModel {
            routing: routing::Settings {
                policy: Policy::LeastLoad,
                ..routing::Settings::default()
            },
            bytes_per_token: 4.0,
            send_tokens: false,
            stream_continuation: None,
        },
        named: FxHashMap::default(),
        names: Vec::new(),
    };
    let mut split = prefill_decode::Settings {
        connector,
        ..prefill_decode::Settings::default()
    };
    split.advanced.min_remote_tokens = 1;
    let tokens = Tokens::new(&tokens::Settings::default(), [], 7, &metrics).unwrap();
    Relay::new(
        crate::relay::Settings::default(),
        fleet.clone(),
        caches,
        models,
        &split,
        Arc::new(tokens),
        Peers::off(&metrics),
        TenantTable::new([]),
        queue,
        Usage::new(None, &metrics),
        &metrics,
    )
}

fn body(is_stream: bool) -> Value {
    let message = json!({"role": "user", "content": "word ".repeat(40)});
    json!({"model": MODEL, "messages": [message], "max_tokens": 9, "stream": is_stream})
}

async fn plan(relay: &Relay, body: &Value) -> Plan {
    let body = Bytes::from(body.to_string());
    let mut peeked = peek(Api::Chat, &body, relay.block_bytes()).unwrap();
    let headers = HeaderMap::new();
    let planned = relay.plan(Api::Chat, &headers, &mut peeked, &body).await;
    Arc::into_inner(planned.unwrap()).unwrap()
}

/// Lines of batches.
#[derive(Default)]
struct Lines {
    entering: Arc<EnteringLines>,
    running: Arc<RunningLines>,
}

impl Lines {
    fn line(&self) -> BatchLine {
        let entering = self.entering.enter(1, self.running.clone());
        BatchLine::new("batch_1".into(), entering)
    }

    /// So many requests of people and so many lines at a worker. They count for as long as this lives.
    fn run(
        &self,
        worker: &Arc<Worker>,
        (people, lines): (u32, u32),
    ) -> Vec<(InFlight, Option<BatchLine>)> {
        let in_flight = || InFlight::new(worker.clone(), 10, 10);
        let people = (0..people).map(|_| (in_flight(), None));
        let lines = (0..lines).map(|_| {
            let line = self.line();
            line.count_at(worker.id);
            (in_flight(), Some(line))
        });
        people.chain(lines).collect()
    }
}

/// The worker that a line would be sent to.
fn found(relay: &Relay, line: &BatchLine, plan: &Plan, failed: &FailedWorkers) -> Option<String> {
    let (decision, _) = relay.find_for_line(line, plan, failed, None)?;
    Some(plan.group.worker(decision.index).name.to_string())
}

#[tokio::test]
async fn a_line_is_sent_where_people_leave_room_for_it() {
    // Requests of people and lines at each of two workers; those that are full; the one that a line is sent to.
    for (what, at_a, at_b, full, expected) in [
        ("there are lines alone", (0, 3), (0, 5), "", Some("a")),
        ("more lines than slots", (0, 20), (0, 18), "", Some("b")),
        ("people leave room", (3, 0), (0, 5), "", Some("a")),
        ("people leave two slots", (14, 0), (0, 15), "a", Some("b")),
        ("with lines, three", (10, 3), (0, 15), "", Some("a")),
        ("with lines, two", (10, 4), (0, 15), "a", Some("b")),
        ("people leave room nowhere", (14, 0), (15, 0), "a b", None),
    ] {
        let fleet = fleet(&[("a", Role::Both), ("b", Role::Both)]);
        let (relay, lines) = (relay(&fleet, None, None), Lines::default());
        let _at_a = lines.run(&worker(&fleet, "a"), at_a);
        let _at_b = lines.run(&worker(&fleet, "b"), at_b);
        let (plan, line) = (plan(&relay, &body(false)).await, lines.line());
        let found_full = relay.full_beside_people(&plan.group, &line.running());
        assert!(found_full.prefill.is_empty(), "{what}");
        let workers = plan.group.workers.iter();
        let full_ones = workers.filter(|worker| found_full.decode.contains(&worker.id));
        let mut names: Vec<&str> = full_ones.map(|worker| &*worker.name).collect();
        names.sort_unstable();
        assert_eq!(names.join(" "), full, "{what}");
        let chosen = found(&relay, &line, &plan, &FailedWorkers::default());
        assert_eq!(chosen.as_deref(), expected, "{what}");
    }
}

#[tokio::test]
async fn a_line_is_sent_neither_where_people_wait_at_another_replica_nor_where_it_has_failed() {
    let fleet = fleet(&[("a", Role::Both), ("b", Role::Both)]);
    let (relay, lines) = (relay(&fleet, None, None), Lines::default());
    let (a, b) = (worker(&fleet, "a"), worker(&fleet, "b"));
    let _at_a = lines.run(&a, (0, 3));
    let _at_b = lines.run(&b, (0, 5));
    let (plan, line) = (plan(&relay, &body(false)).await, lines.line());
    let none_failed = FailedWorkers::default();
    let chosen = found(&relay, &line, &plan, &none_failed);
    assert_eq!(chosen.as_deref(), Some("a"));
    let waiting = [(a.id, LoadShare::of_request(10, 10))];
    fleet.waiting().set_peers(waiting.into_iter().collect());
    let chosen = found(&relay, &line, &plan, &none_failed);
    assert_eq!(chosen.as_deref(), Some("b"));
    let failed = none_failed.without(&[b.id], &[]);
    assert_eq!(found(&relay, &line, &plan, &failed), None);
}

#[tokio::test]
async fn what_an_engine_defers_keeps_no_line_from_its_slots() {
    let fleet = fleet(&[("a", Role::Both)]);
    let relay = relay(&fleet, None, None);
    let room = |deferred| room_beside(&fleet, &relay, (2, 3, deferred));
    // Eleven slots are free, of which two are left to others.
    assert_eq!((room(0), room(2), room(3)), (0, 0, 9));
}

/// Requests of a batch that an engine would take. The engine runs so many requests and lets so many wait, of which it
/// has deferred some.
fn room_beside(
    fleet: &Registry,
    relay: &Relay,
    (running, waiting, deferred): (u32, u32, u32),
) -> u32 {
    worker(fleet, "a").load.report(LoadReport {
        at: observe::now(),
        running,
        waiting,
        deferred,
        kv_usage: 0.1,
    });
    relay.spare_room(MODEL, &FxHashMap::default()).requests
}

#[tokio::test]
async fn what_an_engine_defers_may_want_a_slot_while_none_is_known_to_be_free() {
    // Its slots are not configured.
    let fleet = registry(&["a"]);
    bring_up(&fleet, MODEL);
    let relay = relay(&fleet, None, None);
    let room = |report| room_beside(&fleet, &relay, report);
    // Eight may be sent to it first.
    assert_eq!((room((2, 0, 0)), room((2, 3, 3))), (5, 0));
    // It lets requests of this router wait for a slot, and so shows that it runs eight.
    let running: Vec<InFlight> = (0..10)
        .map(|_| InFlight::new(worker(&fleet, "a"), 10, 10))
        .collect();
    assert_eq!(room((8, 2, 0)), 0);
    drop(running);
    assert_eq!(room((2, 3, 3)), 2);
}

/// Lets so many requests of people with a plan wait for the worker that computes their prompts, until they are dropped.
fn wait_in_line(
    relay: &Arc<Relay>,
    plan: Plan,
    requests: u32,
) -> Vec<Pin<Box<dyn Future<Output = bool>>>> {
    let mut context = Context::from_waker(Waker::noop());
    let plan = Arc::new(plan);
    let settings = relay.queue.clone().unwrap();
    let failed = FailedWorkers::default();
    let now = observe::now();
    let request = Request::for_tests(now, 10);
    let mut waiting: Vec<Pin<Box<dyn Future<Output = bool>>>> = Vec::new();
    for _ in 0..requests {
        let chosen = relay.choose_behind(&plan, &failed, None).unwrap();
        let waits_for = WaitsFor {
            at: observe::now(),
            worker: plan.group.worker(chosen::computes(&chosen).index).id,
            promises: chosen::promises(plan.request.prompt_tokens, &plan.group, &chosen),
        };
        let planned = Planned {
            placing: relay.placing(plan.clone(), failed.clone()),
            waits_for: Some(waits_for),
        };
        let (queues, settings) = (relay.queues().clone(), settings.clone());
        let model = plan.group.model.clone();
        let mut wait = Box::pin(async move {
            let waited = queues.wait(&settings, &model, request, Some(planned));
            waited.await.is_ok()
        });
        assert!(wait.as_mut().poll(&mut context).is_pending());
        waiting.push(wait);
    }
    let mut dispatch = pin!(relay.queues().clone().dispatch(Tasks::default()));
    assert!(dispatch.as_mut().poll(&mut context).is_pending());
    waiting
}

#[tokio::test]
async fn lines_give_way_to_those_who_wait_for_their_worker_and_not_for_another_ones_prompt() {
    let whole = [("a", Role::Both)];
    let pair = [("p", Role::Prefill), ("d", Role::Decode)];
    for (what, workers, connector, full, running, expected) in [
        ("one worker", &whole[..], None, "a", "a", 5),
        ("a pair", &pair[..], Some(Connector::Nixl), "p", "d", 0),
    ] {
        let fleet = fleet(workers);
        let queue = Settings {
            max_worker_queued_tokens: 1_000,
            ..Settings::default()
        };
        let relay = Arc::new(relay(&fleet, connector, Some(queue)));
        let (lines, running) = (Lines::default(), worker(&fleet, running));
        let _running = lines.run(&running, (4, 10));
        let _prompt = InFlight::new(worker(&fleet, full), 1_000, 0);
        let plan = plan(&relay, &body(false)).await;
        let waiting = wait_in_line(&relay, plan, 5);
        let own = fleet
            .waiting()
            .own()
            .as_ref()
            .and_then(|own| own.get(&running.id).map(|load| load.requests));
        assert_eq!(own, Some(5), "{what}");
        let wanted = relay.lines_to_give_way(&lines.running.counts(), 0);
        let wanted: u32 = wanted.iter().map(|(_, count)| count).sum();
        assert_eq!(wanted, expected, "{what}");
        drop(waiting);
    }
}

#[tokio::test]
async fn lines_give_way_to_those_of_other_replicas_who_wait_for_a_decode_worker() {
    let fleet = fleet(&[("p", Role::Prefill), ("d", Role::Decode)]);
    let relay = relay(&fleet, Some(Connector::Nixl), None);
    let (lines, decode) = (Lines::default(), worker(&fleet, "d"));
    let _running = lines.run(&decode, (4, 10));
    // Requests that wait at a replica, with so many tokens to compute at this worker.
    for (queued_tokens, expected) in [(0, 0), (50, 4)] {
        let waiting = LoadShare {
            requests: 5,
            queued_tokens,
            context_tokens: 50,
        };
        let waiting = [(decode.id, waiting)];
        fleet.waiting().set_peers(waiting.into_iter().collect());
        let wanted = relay.lines_to_give_way(&lines.running.counts(), 0);
        let wanted: u32 = wanted.iter().map(|(_, count)| count).sum();
        assert_eq!(wanted, expected, "{queued_tokens} tokens");
    }
}

#[tokio::test]
async fn a_line_that_is_to_be_split_does_not_run_on_one_worker_because_people_fill_the_others() {
    for (what, people, is_split) in [
        ("nobody is at the prefill worker", 0, true),
        ("people leave room there", 3, true),
        ("people leave two of its slots", 14, false),
    ] {
        let fleet = fleet(&[("p", Role::Prefill), ("d", Role::Decode)]);
        let connector = Some(Connector::Nixl);
        let (relay, lines) = (relay(&fleet, connector, None), Lines::default());
        let _at_p = lines.run(&worker(&fleet, "p"), (people, 0));
        let (plan, line) = (plan(&relay, &body(false)).await, lines.line());
        let failed = FailedWorkers::default();
        let whole = failed.without(&[], &[worker(&fleet, "p").id]);
        let alone = relay.choose_behind(&plan, &whole, None);
        assert!(matches!(alone, Some((_, Split::Whole(_)))), "{what}");
        let chosen = relay.find_for_line(&line, &plan, &failed, None);
        let found_split = matches!(chosen, Some((_, Split::Pair(_))));
        assert_eq!(found_split, is_split, "{what}");
        assert_eq!(chosen.is_some(), is_split, "{what}");
    }
}

/// By this the queue takes `max_wait` or `no_worker_timeout`.
#[tokio::test]
async fn explain_says_for_what_requests_wait_while_a_worker_has_a_pause_or_may_get_a_trial() {
    let max_wait = Duration::from_secs(700);
    let no_worker_timeout = Duration::from_secs(60);
    for (is_paused, waits_for, time) in [
        (true, "room", max_wait),
        (false, "worker", no_worker_timeout),
    ] {
        let fleet = fleet(&[("a", Role::Both)]);
        let queue = Settings {
            max_worker_queued_tokens: 1_000,
            max_wait,
            no_worker_timeout,
            ..Settings::default()
        };
        let relay = relay(&fleet, None, Some(queue));
        let plan = plan(&relay, &body(false)).await;
        let worker = worker(&fleet, "a");
        let _full = InFlight::new(worker.clone(), 1_000, 0);
        let now = observe::now();
        if is_paused {
            worker.breaker.pause(now + no_worker_timeout);
        } else {
            worker.breaker.set(1, Duration::ZERO);
            assert!(worker.breaker.on_failure(now));
        }
        let explained = relay.explain_queue(&plan, Standing::LAST).unwrap();
        assert!(explained.would_wait);
        assert_eq!(explained.waits_for, Some(waits_for));
        assert_eq!(explained.max_wait_ms, time.as_millis());
    }
}

/// Its target is compared with this.
#[tokio::test]
async fn the_first_token_of_a_pair_comes_after_its_prefill_leg_and_not_after_two() {
    let fleet = fleet(&[("p", Role::Prefill), ("d", Role::Decode)]);
    let relay = relay(&fleet, Some(Connector::Nixl), None);
    let _prompt = InFlight::new(worker(&fleet, "p"), 100_000, 0);
    let plan = plan(&relay, &body(false)).await;
    let chosen = relay.choose_behind(&plan, &FailedWorkers::default(), None);
    let chosen = chosen.unwrap();
    let prefill = chosen.1.prefill().unwrap().expected.first_token;
    let first_token = chosen::first_token(&chosen);
    assert!(
        (prefill..1.5 * prefill).contains(&first_token),
        "{first_token} s, {prefill} s of prefill"
    );
}

#[tokio::test]
async fn a_prompt_whose_first_token_is_not_seen_counts_as_queued_until_it_is_expected() {
    let queue = Settings {
        stale_after: Duration::from_secs(5),
        ..Settings::default()
    };
    for (what, queue, is_stream, first_token, expected) in [
        ("a stream shows it", None, true, 2.0, None),
        ("it comes soon", None, false, 2.0, Some(2)),
        ("it comes late", None, false, 90.0, Some(30)),
        ("the queue waits less", Some(queue), false, 90.0, Some(5)),
        ("it never comes", None, false, f64::INFINITY, Some(30)),
    ] {
        let fleet = fleet(&[("a", Role::Both)]);
        let relay = relay(&fleet, None, queue);
        let plan = plan(&relay, &body(is_stream)).await;
        let first = Expected {
            first_token,
            ..Expected::default()
        };
        let after = relay.unseen_prefill(&plan, &first);
        assert_eq!(after, expected.map(Duration::from_secs), "{what}");
    }
}

/// The choice of the first wait came to nothing.
#[tokio::test]
async fn a_request_that_lost_its_target_in_its_first_wait_has_none_in_its_second() {
    let fleet = registry(&["a"]);
    let queue = Settings {
        no_worker_timeout: Duration::from_secs(60),
        // It is over before the worker comes.
        ttft_target: Duration::from_nanos(1),
        ..Settings::default()
    };
    let relay = relay(&fleet, None, Some(queue));
    let model = Model::from(MODEL);
    let (headers, body) = (HeaderMap::new(), Bytes::from(body(true).to_string()));
    let caller = RequestContext::new(
        RequestId::new(1),
        ClientKey::of_tenant(Tenant::default()),
        Tenant::default(),
        observe::now(),
    );
    let target = Uri::from_static("/v1/chat/completions");
    let job = Job::new(caller, Api::Chat, target, &headers, body.clone(), &body);
    let peeked = peek(Api::Chat, &body, relay.block_bytes()).unwrap();
    let mut waits = relay.waits(&job, &peeked).unwrap().unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut dispatch = pin!(relay.queues().clone().dispatch(Tasks::default()));
    {
        let request = relay.waiting_request(&job, &waits, 10);
        let mut first = pin!(relay.enter(&job, &model, request, None, &mut waits));
        assert!(first.as_mut().poll(&mut context).is_pending());
        bring_up(&fleet, MODEL);
        assert!(dispatch.as_mut().poll(&mut context).is_pending());
        assert!(matches!(
            first.as_mut().poll(&mut context),
            Poll::Ready(Ok(()))
        ));
    }
    assert!(waits.goes_on(0));
    let _full = InFlight::new(worker(&fleet, "a"), 10_000, 0);
    let request = relay.waiting_request(&job, &waits, 10);
    let mut second = pin!(relay.enter(&job, &model, request, None, &mut waits));
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert!(dispatch.as_mut().poll(&mut context).is_pending());
    // With its target it would be refused here.
    assert!(second.as_mut().poll(&mut context).is_pending());
}
