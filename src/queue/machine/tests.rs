use std::collections::BTreeSet;

use proptest::prelude::*;

use super::walk::LOOKED_AT_MAX;
use super::*;
use crate::ids::ClientKey;
use crate::observe;
use crate::queue::settings::ClassSettings;
use crate::queue::types::{Look, Timing};

const FULL: Room = Room {
    workers: 2,
    counted_workers: 1,
    is_full: true,
    others_have_room: false,
    queued_tokens: 0,
    rate: 1_000,
};

struct Rig {
    queue: Queue<u64>,
    start: Instant,
    now: Instant,
    computed: u64,
    count: u64,
    tokens: Vec<u64>,
}

impl Rig {
    fn new(change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = Settings::default();
        change(&mut settings);
        let now = observe::now();
        Self {
            queue: Queue::new(Arc::new(settings)),
            start: now,
            now,
            computed: 0,
            count: 0,
            tokens: vec![0],
        }
    }

    fn request(&self) -> Request {
        Request::for_tests(self.now, 1_000)
    }

    fn enter(&mut self, change: impl FnOnce(&mut Request)) -> Result<u64, &'static str> {
        self.enter_with(FULL, change)
    }

    fn enter_with(
        &mut self,
        room: Room,
        change: impl FnOnce(&mut Request),
    ) -> Result<u64, &'static str> {
        let mut request = self.request();
        change(&mut request);
        let entered = self.enter_request(room, request);
        entered.map(|(number, left)| {
            assert!(left.is_empty(), "{left:?}");
            number
        })
    }

    /// The request's number, and who left for it.
    fn enter_request(
        &mut self,
        room: Room,
        request: Request,
    ) -> Result<(u64, Vec<u64>), &'static str> {
        self.count += 1;
        self.tokens.push(request.tokens.max(COST_MIN));
        let entered = self.queue.enter(self.now, room, request, self.count);
        match entered {
            Ok(Entered { left, .. }) => Ok((
                self.count,
                left.into_iter().map(|left| left.waker).collect(),
            )),
            Err((refusal, _)) => Err(refusal.reason.code()),
        }
    }

    fn classes(&self) -> Vec<ClassStatus> {
        let all = self.queue.classes(self.now, |_| &());
        let none = || vec![ClassStatus::default(); self.queue.order.len()];
        all.into_values().next().unwrap_or_else(none)
    }

    fn wait(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }

    /// Who left, and how.
    fn advance(&mut self, room: Room) -> Vec<(u64, &'static str)> {
        self.advance_with(room, |_, _| Look::Send)
    }

    fn advance_with(
        &mut self,
        room: Room,
        mut look: impl FnMut(&u64, Option<Duration>) -> Look,
    ) -> Vec<(u64, &'static str)> {
        let look = |number: &u64, timing: Timing, _| look(number, timing.time_left);
        let left = self.queue.advance(self.now, room, self.computed, look);
        let outcome = |left: Left<u64>| match left.outcome {
            Outcome::Released => (left.waker, "released"),
            Outcome::Refused(refusal) => (left.waker, refusal.reason.code()),
            Outcome::Moved => (left.waker, "moved"),
        };
        left.into_iter().map(outcome).collect()
    }

    /// One worker has room for so many tokens; the last request may have more.
    fn free(&mut self, free_tokens: u64) -> Vec<(u64, &'static str)> {
        let room = Room {
            is_full: free_tokens == 0,
            ..FULL
        };
        let tokens = self.tokens.clone();
        let mut free = free_tokens;
        // Each worker computes 1,000 tokens a second.
        let first_token = |number: u64| Duration::from_millis(tokens[number as usize]);
        self.advance_with(room, |number, time_left| match free {
            0 => Look::Full,
            _ if time_left.is_some_and(|left| first_token(*number) > left) => {
                Look::TooLate(first_token(*number))
            }
            _ => {
                free = free.saturating_sub(tokens[*number as usize]);
                Look::Send
            }
        })
    }

    /// Two workers compute 1,000 tokens a second each, with something waiting.
    fn measure(&mut self) {
        let filler = self.enter(|request| request.priority = -1).unwrap();
        for _ in 0..100 {
            self.wait(10);
            self.computed += 20;
            self.advance(FULL);
        }
        assert!(self.queue.leave(EntryId(filler - 1)).is_some());
        let rate = self.queue.measured_rate().unwrap();
        assert!((900.0..1_100.0).contains(&rate), "{rate}");
    }
}

#[test]
fn as_many_are_released_as_there_is_room_for() {
    let mut rig = Rig::new(|_| {});
    for _ in 0..5 {
        rig.enter(|_| {}).unwrap();
    }
    assert_eq!(rig.free(0), []);
    assert_eq!(rig.free(1), [(1, "released")]);
    assert_eq!(rig.free(1_001), [(2, "released"), (3, "released")]);
    assert_eq!(rig.free(u64::MAX), [(4, "released"), (5, "released")]);
    assert!(rig.queue.is_empty() && rig.queue.expiries.is_empty());
}

#[test]
fn a_higher_class_is_first_and_the_floor_is_kept() {
    let mut rig = Rig::new(|_| {});
    for _ in 0..8 {
        rig.enter(|request| request.priority = 0).unwrap();
        rig.enter(|request| request.priority = 5).unwrap();
    }
    let order: Vec<bool> = (0..8)
        .flat_map(|_| rig.free(1))
        .map(|(id, _)| id % 2 == 0)
        .collect();
    // Of five requests of one size, one is of the class with a share of 0.2.
    assert_eq!(order, [true, true, true, true, true, false, true, true]);
}

#[test]
fn a_priority_below_all_classes_is_of_the_lowest() {
    let mut rig = Rig::new(|settings| {
        settings.classes = [("b", 0), ("a", 10)]
            .map(|(name, priority)| ClassSettings {
                name: name.to_owned(),
                priority,
                ..ClassSettings::default()
            })
            .into();
    });
    rig.enter(|request| request.priority = -7).unwrap();
    rig.enter(|request| request.priority = 9).unwrap();
    rig.enter(|request| request.priority = 10).unwrap();
    let requests: Vec<u32> = rig.classes().iter().map(|class| class.requests).collect();
    assert_eq!(requests, [2, 1]);
    assert_eq!(rig.free(u64::MAX)[0].0, 3);
}

#[test]
fn what_waits_is_counted_by_kind_class_and_client() {
    let mut rig = Rig::new(|_| {});
    for (priority, client) in [(0, 1), (5, 2), (0, 1), (5, 1), (0, 2)] {
        rig.enter(|request| {
            (request.priority, request.client) = (priority, ClientKey(client));
        })
        .unwrap();
    }
    let kinds = ["even", "odd"];
    let classes = rig
        .queue
        .classes(rig.now, |number| &kinds[*number as usize % 2]);
    let counts = |kind: &'static str| -> Vec<(u32, usize)> {
        let of_kind = classes[&kind].iter();
        of_kind
            .map(|class| (class.requests, class.clients))
            .collect()
    };
    // High, normal and low.
    assert_eq!(counts("odd"), [(0, 0), (3, 2), (0, 0)]);
    assert_eq!(counts("even"), [(2, 2), (0, 0), (0, 0)]);
}

#[test]
fn a_class_has_bounds_of_its_own() {
    let mut rig = Rig::new(|settings| {
        settings.max_requests = 2;
        settings.max_size = 25;
        settings.classes[0].max_requests = Some(3);
    });
    assert!(rig.enter(|request| request.bytes = 20).is_ok());
    assert_eq!(rig.enter(|request| request.bytes = 6), Err("queue_full"));
    assert!(rig.enter(|request| request.bytes = 5).is_ok());
    assert_eq!(rig.enter(|request| request.bytes = 0), Err("queue_full"));
    for _ in 0..3 {
        assert!(
            rig.enter(|request| (request.priority, request.bytes) = (1, 0))
                .is_ok()
        );
    }
    assert_eq!(
        rig.enter(|request| (request.priority, request.bytes) = (1, 0)),
        Err("queue_full")
    );
}

#[test]
fn the_memory_of_lower_classes_is_given_up_and_no_other() {
    let mut rig = Rig::new(|_| {});
    for priority in [-5, 5, 0, -5, 0] {
        rig.enter(|request| request.priority = priority).unwrap();
        rig.wait(10);
    }
    rig.enter(|request| {
        request.priority = -5;
        request.is_background = true;
    })
    .unwrap();
    let below = |rig: &Rig, priority| {
        let mut found = rig.queue.below(priority);
        found.sort_by_key(|below| std::cmp::Reverse((below.class, below.entered)));
        found
    };
    assert!(below(&rig, -5).is_empty());
    assert_eq!(below(&rig, 0).len(), 2);
    let found = below(&rig, 5);
    assert_eq!(found.len(), 4);
    // The newest of the lowest class first.
    let now = rig.now;
    let left: Vec<u64> = found
        .iter()
        .map(|below| rig.queue.give_up(now, below.id).unwrap().waker)
        .collect();
    assert_eq!(left, [4, 1, 5, 3]);
    assert!(rig.queue.give_up(now, found[0].id).is_none());
}

#[test]
fn a_request_gives_up_the_memory_of_what_its_client_sent_and_not_of_its_history() {
    let mut rig = Rig::new(|_| {});
    rig.enter(|request| {
        request.priority = -5;
        (request.bytes, request.client_bytes) = (1_000, 20);
    })
    .unwrap();
    assert_eq!(rig.queue.below(0)[0].bytes, 20);
}

#[test]
fn a_flood_makes_place_for_the_others_with_its_newest_requests() {
    let mut rig = Rig::new(|settings| {
        settings.max_requests = 4;
        settings.max_size = 100;
    });
    let of = |rig: &Rig, client, bytes| Request {
        client: ClientKey(client),
        bytes,
        ..rig.request()
    };
    for _ in 0..4 {
        rig.enter(|_| {}).unwrap();
    }
    assert_eq!(rig.enter(|_| {}), Err("queue_full"));
    let mut enter = |client, bytes| {
        let request = of(&rig, client, bytes);
        rig.enter_request(FULL, request)
    };
    assert_eq!(enter(2, 10), Ok((6, vec![4])));
    assert_eq!(enter(2, 10), Ok((7, vec![3])));
    assert_eq!(enter(2, 10), Err("queue_full"));
    assert_eq!(enter(3, 0), Ok((9, vec![7])));
    // The same for bytes.
    let mut rig = Rig::new(|settings| settings.max_size = 100);
    for _ in 0..3 {
        rig.enter(|request| request.bytes = 30).unwrap();
    }
    let mut enter = |client, bytes| {
        let request = of(&rig, client, bytes);
        rig.enter_request(FULL, request)
    };
    assert_eq!(enter(2, 60), Err("queue_full"));
    assert_eq!(enter(2, 35), Ok((5, vec![3])));
    assert_eq!(enter(1, 11), Err("queue_full"));
}

#[test]
fn the_shortest_prompt_is_next_until_a_longer_one_has_waited_for_it() {
    let mut rig = Rig::new(|_| {});
    let second = Duration::from_secs(1);
    rig.enter(|request| request.compute = 3 * second).unwrap();
    rig.wait(5_000);
    rig.enter(|request| request.compute = 2 * second).unwrap();
    // It comes nine seconds later; each counts for 0.3 s of computing.
    rig.wait(4_000);
    rig.enter(|request| request.compute = second / 5).unwrap();
    rig.enter(|request| request.compute = second / 2).unwrap();
    rig.enter(|request| (request.compute, request.ttft_target) = (20 * second, Some(60 * second)))
        .unwrap();
    let order: Vec<u64> = rig
        .free(u64::MAX)
        .iter()
        .map(|(number, _)| *number)
        .collect();
    assert_eq!(order, [5, 3, 1, 4, 2]);
}

#[test]
fn who_waits_for_one_worker_is_passed_by_who_waits_for_another_and_only_so_many_are_looked_at() {
    let mut rig = Rig::new(|_| {});
    let room = Room {
        is_full: false,
        ..FULL
    };
    for _ in 0..4 {
        rig.enter(|_| {}).unwrap();
    }
    let is_third = |number: &u64, _| match number {
        3 => Look::Send,
        _ => Look::Wait,
    };
    assert_eq!(rig.advance_with(room, is_third), [(3, "released")]);
    for _ in 0..100 {
        rig.enter(|_| {}).unwrap();
    }
    let mut looked = 0;
    let none = |_: &u64, _| {
        looked += 1;
        Look::Wait
    };
    assert_eq!(rig.advance_with(room, none), []);
    assert_eq!(looked, LOOKED_AT_MAX);
}

#[test]
fn while_the_workers_are_full_others_get_what_they_compute_themselves() {
    let mut rig = Rig::new(|_| {});
    for _ in 0..3 {
        rig.enter(|_| {}).unwrap();
    }
    let is_second = |number: &u64, _| match number {
        2 => Look::Send,
        _ => Look::Wait,
    };
    assert_eq!(rig.advance_with(FULL, is_second), []);
    let room = Room {
        others_have_room: true,
        ..FULL
    };
    assert_eq!(rig.advance_with(room, is_second), [(2, "released")]);
}

#[test]
fn those_who_are_known_to_wait_for_a_full_worker_do_not_keep_others_from_their_turn() {
    let room = Room {
        is_full: false,
        ..FULL
    };
    let mut rig = Rig::new(|_| {});
    let max = PASSED_OVER_MAX as u64;
    for _ in 0..5 * max {
        rig.enter(|_| {}).unwrap();
    }
    // All but this one are known to wait.
    for (free, ticks) in [(max, 1), (5 * max, 4), (max / 2, 1), (3 * max, 8)] {
        let mut left = Vec::new();
        for _ in 0..ticks {
            rig.wait(10);
            let mut looked = 0;
            let look = |number: &u64, _| {
                looked += 1;
                if *number == free {
                    Look::Send
                } else {
                    Look::PassOver
                }
            };
            left.extend(rig.advance_with(room, look));
            assert!(looked <= 2 * PASSED_OVER_MAX + 1, "{looked}");
        }
        assert_eq!(left, [(free, "released")]);
    }
    // However often workers are looked at, those behind the first ones are reached 100 times a second.
    let mut looked = 0;
    rig.advance_with(room, |_, _| {
        looked += 1;
        Look::PassOver
    });
    assert_eq!(looked, PASSED_OVER_MAX);
}

#[test]
fn a_request_is_due_by_its_target_or_else_by_its_length_in_its_class() {
    let rig = Rig::new(|_| {});
    let ms = Duration::from_millis;
    for (priority, target, compute, expected) in [
        (5, None, 300, (1, 1_000)),
        (0, Some(ms(70)), 300, (0, 70)),
        (-1, None, 0, (i32::MIN, 0)),
    ] {
        let due = rig.queue.due(&Request {
            priority,
            compute: ms(compute),
            ttft_target: target,
            ..rig.request()
        });
        let left = due.at.duration_since(rig.now).as_millis();
        assert_eq!((due.priority, left), expected);
    }
}

#[test]
fn those_who_wait_in_another_queue_from_now_on_are_taken_out() {
    let mut rig = Rig::new(|_| {});
    for _ in 0..4 {
        rig.enter(|_| {}).unwrap();
    }
    let is_moved = |number: &u64| number.is_multiple_of(2);
    let moved = rig.queue.end(rig.now, Outcome::Moved, is_moved);
    let moved: Vec<u64> = moved.iter().map(|left| left.waker).collect();
    assert_eq!(moved, [2, 4]);
    assert_eq!(rig.free(u64::MAX), [(1, "released"), (3, "released")]);
}

#[test]
fn a_wait_ends_after_max_wait() {
    let mut rig = Rig::new(|settings| settings.max_wait = Duration::from_secs(2));
    rig.enter(|_| {}).unwrap();
    rig.wait(1_999);
    assert_eq!(rig.free(0), []);
    rig.wait(1);
    // Also if there is room just then.
    assert_eq!(rig.free(10), [(1, "queue_timeout")]);
}

#[test]
fn a_refusal_names_the_setting_that_ended_the_wait() {
    let request_timeout = "requests.request_timeout";
    let none = Room::default();
    // Seconds of `max_wait`, of that of the class, of `no_worker_timeout`, and of the request.
    let table = [
        (FULL, [2, 0, 9, 5], "queue.max_wait"),
        (FULL, [2, 3, 9, 5], "queue.classes[1].max_wait"),
        (FULL, [5, 0, 9, 2], request_timeout),
        (FULL, [2, 5, 9, 3], request_timeout),
        (none, [1, 0, 2, 5], "queue.no_worker_timeout"),
        (none, [1, 0, 5, 2], request_timeout),
    ];
    for (room, seconds, expected) in table {
        let [max_wait, of_class, no_worker, own] = seconds.map(Duration::from_secs);
        let mut rig = Rig::new(|settings| {
            settings.max_wait = max_wait;
            settings.classes[1].max_wait = Some(of_class).filter(|wait| !wait.is_zero());
            settings.no_worker_timeout = no_worker;
        });
        let deadline = rig.now + own;
        rig.enter_with(room, |request| request.deadline = deadline)
            .unwrap();
        rig.wait(5_000);
        let left = rig.queue.advance(rig.now, room, 0, |_, _, _| Look::Full);
        let Some(Outcome::Refused(refusal)) = left.first().map(|left| left.outcome) else {
            panic!("{expected}: {left:?}");
        };
        let text = refusal.reason.to_string();
        assert!(text.contains(&format!("({expected})")), "{text}");
    }
}

#[test]
fn what_no_client_waits_for_waits_as_long_as_it_may_run() {
    let mut rig = Rig::new(|settings| settings.ttft_target = Duration::from_secs(1));
    rig.enter(|request| request.is_background = true).unwrap();
    rig.wait(599_999);
    assert_eq!(rig.free(0), []);
    rig.wait(1);
    assert_eq!(rig.free(0), [(1, "queue_timeout")]);
}

#[test]
fn prompts_are_computed_as_fast_as_was_learnt_however_few_left_lately() {
    let mut rig = Rig::new(|settings| settings.ttft_target = Duration::from_secs(3));
    // 1,000 tokens a second and worker left, because slots were taken, or because other replicas have their part of the workers.
    rig.measure();
    let room = Room {
        queued_tokens: 9_000,
        ..FULL
    };
    let entered = rig.enter_with(room, |request| request.tokens = 1_000);
    assert_eq!(entered, Err("ttft_target_unreachable"));
    let fast = Room {
        rate: 10_000,
        ..room
    };
    assert!(
        rig.enter_with(fast, |request| request.tokens = 1_000)
            .is_ok()
    );
}

#[test]
fn a_request_that_leaves_is_not_released() {
    let mut rig = Rig::new(|_| {});
    rig.enter(|_| {}).unwrap();
    rig.enter(|_| {}).unwrap();
    assert_eq!(rig.queue.leave(EntryId(0)), Some(1));
    assert_eq!(rig.queue.leave(EntryId(0)), None);
    assert_eq!(rig.free(u64::MAX), [(2, "released")]);
}

#[test]
fn what_cannot_meet_its_target_is_refused_at_once_and_what_can_waits() {
    let mut rig = Rig::new(|settings| settings.ttft_target = Duration::from_millis(2_100));
    // Before the rate is known, nothing is.
    for _ in 0..10 {
        rig.enter(|_| {}).unwrap();
    }
    rig.free(u64::MAX);
    rig.measure();
    // 2,000 tokens a second: 1,000 tokens of its own take a second of one worker.
    assert!(rig.enter(|_| {}).is_ok());
    assert!(rig.enter(|_| {}).is_ok());
    assert_eq!(rig.enter(|_| {}), Err("ttft_target_unreachable"));
    // A client with nothing in the queue yet is only behind its share.
    let other = |request: &mut Request| (request.client, request.tokens) = (ClientKey(2), 100);
    assert!(rig.enter(other).is_ok());
    // As is one with more time, or of a higher class.
    assert!(
        rig.enter(|request| request.ttft_target = Some(Duration::from_secs(5)))
            .is_ok()
    );
    assert!(rig.enter(|request| request.priority = 1).is_ok());
}

#[test]
fn what_waits_for_others_keeps_no_request_from_entering_whose_own_worker_has_room() {
    let mut rig = Rig::new(|settings| settings.ttft_target = Duration::from_millis(2_100));
    rig.measure();
    rig.enter(|_| {}).unwrap();
    rig.enter(|_| {}).unwrap();
    assert_eq!(rig.enter(|_| {}), Err("ttft_target_unreachable"));
    let room = Room {
        is_full: false,
        ..FULL
    };
    // Room at another worker is of no use to it.
    let full = rig.enter_with(room, |_| {});
    assert_eq!(full, Err("ttft_target_unreachable"));
    let own = rig.enter_with(room, |request| request.has_room = true);
    let own = own.unwrap();
    let look = |number: &u64, _| {
        if *number == own {
            Look::Send
        } else {
            Look::Wait
        }
    };
    assert_eq!(rig.advance_with(room, look), [(own, "released")]);
}

#[test]
fn a_request_whose_turn_comes_too_late_is_refused_for_one_that_is_in_time() {
    let mut rig = Rig::new(|settings| settings.ttft_target = Duration::from_secs(3));
    rig.measure();
    let late = rig.enter(|request| request.tokens = 1_000).unwrap();
    rig.wait(2_500);
    let timely = rig.enter(|request| request.tokens = 100).unwrap();
    assert_eq!(
        rig.free(1),
        [(late, "ttft_target_unreachable"), (timely, "released")]
    );
}

#[test]
fn without_a_worker_requests_wait_for_one_and_their_other_times_start_when_it_comes() {
    let mut rig = Rig::new(|settings| {
        settings.no_worker_timeout = Duration::from_secs(60);
        settings.max_wait = Duration::from_secs(10);
        settings.ttft_target = Duration::from_secs(1);
    });
    let none = Room::default();
    rig.enter_with(none, |_| {}).unwrap();
    rig.wait(1_000);
    rig.enter_with(none, |_| {}).unwrap();
    rig.wait(58_999);
    assert_eq!(rig.advance(none), []);
    rig.wait(1);
    assert_eq!(rig.advance(none), [(1, "no_healthy_worker")]);
    assert_eq!(rig.free(0), []);
    rig.wait(9_999);
    assert_eq!(rig.free(0), []);
    assert_eq!(rig.free(1), [(2, "released")]);
}

#[test]
fn whose_model_lacks_a_worker_waits_for_one_and_not_for_room_though_others_have_workers() {
    let mut rig = Rig::new(|settings| {
        settings.no_worker_timeout = Duration::from_secs(60);
        settings.max_wait = Duration::from_secs(10);
    });
    let other = rig.enter(|_| {}).unwrap();
    let lacking = [(); 2].map(|()| rig.enter(|_| {}).unwrap());
    rig.wait(5_000);
    rig.queue
        .set_lacks_worker(rig.now, |number| lacking.contains(number));
    rig.wait(5_000);
    assert_eq!(rig.advance(FULL), [(other, "queue_timeout")]);
    rig.wait(40_000);
    // A worker comes that one of the two can have: its time for room begins.
    rig.queue
        .set_lacks_worker(rig.now, |number| *number == lacking[0]);
    rig.wait(9_999);
    assert_eq!(rig.advance(FULL), []);
    rig.wait(1);
    assert_eq!(rig.advance(FULL), [(lacking[1], "queue_timeout")]);
    rig.wait(4_999);
    assert_eq!(rig.advance(FULL), []);
    rig.wait(1);
    assert_eq!(rig.advance(FULL), [(lacking[0], "no_healthy_worker")]);
}

#[test]
fn where_no_worker_is_waited_for_a_request_whose_model_lacks_one_is_refused_beside_others() {
    let mut rig = Rig::new(|_| {});
    let entered = rig.enter(|request| request.lacks_worker = true);
    assert_eq!(entered, Err("no_healthy_worker"));
    let waiting = rig.enter(|_| {}).unwrap();
    rig.queue.set_lacks_worker(rig.now, |_| true);
    assert_eq!(rig.advance(FULL), [(waiting, "no_healthy_worker")]);
}

#[test]
fn while_workers_of_others_come_and_go_the_wait_for_a_worker_goes_on() {
    let mut rig = Rig::new(|settings| settings.no_worker_timeout = Duration::from_secs(60));
    rig.enter(|_| {}).unwrap();
    rig.queue.set_lacks_worker(rig.now, |_| true);
    for room in [FULL, Room::default(), FULL] {
        rig.wait(19_999);
        assert_eq!(rig.advance(room), []);
    }
    rig.wait(3);
    assert_eq!(rig.advance(FULL), [(1, "no_healthy_worker")]);
}

#[test]
fn a_request_that_has_lost_its_target_keeps_its_turn_and_is_not_refused() {
    let mut rig = Rig::new(|_| {});
    rig.measure();
    let without = rig.enter(|_| {}).unwrap();
    let target = Some(Duration::from_millis(100));
    let refused = rig.enter(|request| request.ttft_target = target);
    assert_eq!(refused, Err("ttft_target_unreachable"));
    let lost = rig.enter(|request| (request.ttft_target, request.has_lost_target) = (target, true));
    let lost = lost.unwrap();
    rig.wait(200);
    assert_eq!(rig.free(0), []);
    let left = [(lost, "released"), (without, "released")];
    assert_eq!(rig.free(u64::MAX), left);
}

#[test]
fn a_request_loses_its_target_by_waiting_for_a_worker_whatever_other_settings_say() {
    let of = |seconds| Settings {
        ttft_target: Duration::from_secs(seconds),
        no_worker_timeout: Duration::from_secs(60),
        ..Settings::default()
    };
    // The workers are gone when it comes, or go later, or stay.
    let none = Room::default();
    for (before, after, is_lost) in [(none, FULL, true), (FULL, none, true), (FULL, FULL, false)] {
        let mut rig = Rig::new(|settings| *settings = of(1));
        rig.enter_with(before, |_| {}).unwrap();
        assert_eq!(rig.advance(after), []);
        assert_eq!(rig.advance(FULL), []);
        rig.queue.set_settings(Arc::new(of(0)));
        rig.queue.set_settings(Arc::new(of(10)));
        let left = rig.queue.end(rig.now, Outcome::Moved, |_| true);
        assert_eq!(left[0].request.has_lost_target, is_lost);
        rig.enter(|request| request.has_lost_target = is_lost)
            .unwrap();
        rig.wait(10_000);
        assert_eq!(rig.advance(FULL).is_empty(), is_lost);
    }
}

#[test]
fn no_worker_is_waited_for_with_a_timeout_of_zero() {
    let mut rig = Rig::new(|settings| settings.no_worker_timeout = Duration::ZERO);
    assert_eq!(
        rig.enter_with(Room::default(), |_| {}),
        Err("no_healthy_worker")
    );
}

#[test]
fn workers_that_come_and_go_do_not_make_a_request_wait_for_ever() {
    let mut rig = Rig::new(|_| {});
    rig.enter(|_| {}).unwrap();
    let mut left = Vec::new();
    for step in 0..1_000 {
        rig.wait(1_000);
        left.extend(rig.advance(if step % 2 == 0 { Room::default() } else { FULL }));
    }
    assert_eq!(left.len(), 1);
    assert!(rig.queue.is_empty());
}

#[test]
fn other_settings_hold_for_those_who_wait_already() {
    let mut rig = Rig::new(|_| {});
    rig.enter(|_| {}).unwrap();
    rig.enter(|request| request.priority = 3).unwrap();
    let settings = Settings {
        max_wait: Duration::from_secs(1),
        classes: vec![ClassSettings {
            name: "all".to_owned(),
            ..ClassSettings::default()
        }],
        ..Settings::default()
    };
    rig.queue.set_settings(Arc::new(settings));
    assert_eq!(rig.classes()[0].requests, 2);
    assert_eq!(rig.free(1), [(1, "released")]);
    rig.wait(1_000);
    assert_eq!(rig.free(0), [(2, "queue_timeout")]);
}

#[test]
fn another_target_holds_for_those_who_wait_already() {
    let of = |seconds| Settings {
        ttft_target: Duration::from_secs(seconds),
        ..Settings::default()
    };
    let mut rig = Rig::new(|settings| *settings = of(1));
    rig.enter(|_| {}).unwrap();
    rig.enter(|request| request.ttft_target = Some(Duration::from_secs(1)))
        .unwrap();
    rig.queue.set_settings(Arc::new(of(0)));
    rig.wait(1_000);
    // Its own one stays.
    assert_eq!(rig.advance(FULL), [(2, "ttft_target_unreachable")]);
    rig.queue.set_settings(Arc::new(of(3)));
    rig.wait(1_999);
    assert_eq!(rig.advance(FULL), []);
    rig.wait(1);
    assert_eq!(rig.advance(FULL), [(1, "ttft_target_unreachable")]);
}

#[test]
fn requests_that_are_refused_do_not_prolong_the_wait_for_a_worker() {
    let mut rig = Rig::new(|settings| {
        settings.no_worker_timeout = Duration::from_secs(60);
        settings.max_size = 100;
    });
    rig.enter_with(Room::default(), |_| {}).unwrap();
    rig.wait(59_999);
    assert_eq!(rig.advance(Room::default()), []);
    // Of a model that shares a worker, which is up, with others.
    let refused = rig.enter_with(FULL, |request| request.bytes = 101);
    assert_eq!(refused, Err("queue_full"));
    rig.wait(1);
    assert_eq!(rig.advance(Room::default()), [(1, "no_healthy_worker")]);
}

#[derive(Clone, Debug)]
enum Step {
    Enter {
        priority: i32,
        client: u64,
        tokens: u64,
        bytes: u64,
    },
    Leave(prop::sample::Index),
    Advance {
        ms: u64,
        lines: Vec<bool>,
        workers: u32,
    },
    Reload {
        max_requests: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (-2..3, 0u64..4, 0u64..5_000, 0u64..40).prop_map(|(priority, client, tokens, bytes)| {
            Step::Enter { priority, client, tokens, bytes }
        }),
        1 => any::<prop::sample::Index>().prop_map(Step::Leave),
        3 => (0u64..3_000, prop::collection::vec(any::<bool>(), 3), 0u32..4).prop_map(|(ms, lines, workers)| {
            Step::Advance { ms, lines, workers }
        }),
        1 => (1u32..6).prop_map(|max_requests| Step::Reload { max_requests }),
    ]
}

proptest! {
    /// Against the plainest model: the set of those who wait. Everyone leaves once, none waits while there is room, none
    /// waits too long, and a class never has more than it may.
    #[test]
    fn everyone_leaves_once_and_no_room_stays_unused(steps in prop::collection::vec(step(), 1..200)) {
        let settings = Settings {
            max_requests: 4,
            max_size: 100,
            max_wait: Duration::from_secs(5),
            no_worker_timeout: Duration::from_secs(3),
            ..Settings::default()
        };
        let mut rig = Rig::new(|own| *own = settings.clone());
        let mut waiting: BTreeSet<u64> = BTreeSet::new();
        let mut max = settings.max_requests;
        for step in steps {
            match step {
                Step::Enter { priority, client, tokens, bytes } => {
                    let before = rig.classes();
                    let class = settings.class_of(priority);
                    let has_room = before[class].requests < max && before[class].bytes + bytes <= 100;
                    let client = ClientKey(client);
                    let request = Request { priority, client, tokens, bytes, ..rig.request() };
                    let of_client = |rig: &Rig| {
                        let own = rig.queue.entries.values();
                        let own = own.filter(|entry| entry.request.client == client && entry.request.priority == priority);
                        own.count()
                    };
                    let own = of_client(&rig);
                    if let Ok((number, left)) = rig.enter_request(FULL, request) {
                        prop_assert!(!has_room || left.is_empty(), "someone left a class with room");
                        waiting.insert(number);
                        for number in left {
                            prop_assert!(waiting.remove(&number), "left twice");
                        }
                        prop_assert_eq!(of_client(&rig), own + 1, "a client paid for itself");
                        let after = rig.classes()[class].clone();
                        prop_assert!(after.requests <= max.max(before[class].requests));
                        prop_assert!(after.bytes <= 100);
                    } else {
                        prop_assert!(!has_room);
                    }
                }
                Step::Leave(index) => {
                    let ids: Vec<EntryId> = rig.queue.entries.keys().copied().collect();
                    if !ids.is_empty() {
                        let id = ids[index.index(ids.len())];
                        let number = rig.queue.leave(id);
                        prop_assert!(number.is_some_and(|number| waiting.remove(&number)));
                    }
                }
                Step::Advance { ms, lines, workers } => {
                    rig.wait(ms);
                    let room = Room { workers, is_full: !lines.contains(&true), ..FULL };
                    // Each waits for one of three workers, and those that have room take one each.
                    let line = |number: &u64| (*number % 3) as usize;
                    let mut free = lines.clone();
                    let look = |number: &u64, _, _| {
                        if std::mem::take(&mut free[line(number)]) {
                            Look::Send
                        } else {
                            Look::Wait
                        }
                    };
                    let mut sent = [false; 3];
                    for left in rig.queue.advance(rig.now, room, 0, look) {
                        prop_assert!(waiting.remove(&left.waker), "left twice");
                        if left.outcome == Outcome::Released {
                            let line = line(&left.waker);
                            prop_assert!(lines[line] && workers > 0, "released without room");
                            prop_assert!(!std::mem::replace(&mut sent[line], true), "two for one place");
                        }
                        prop_assert!(left.waited <= Duration::from_millis(8_000 + ms));
                    }
                    let unused = |number: &u64| lines[line(number)] && !sent[line(number)];
                    prop_assert!(workers == 0 || !waiting.iter().any(unused), "room stayed unused");
                }
                Step::Reload { max_requests } => {
                    max = max_requests;
                    let settings = Settings { max_requests, ..settings.clone() };
                    rig.queue.set_settings(Arc::new(settings));
                }
            }
            prop_assert_eq!(rig.queue.len(), waiting.len());
            prop_assert_eq!(rig.queue.expiries.len(), waiting.len());
            let requests: u32 = rig.classes().iter().map(|class| class.requests).sum();
            prop_assert_eq!(requests as usize, waiting.len());
        }
        let left = rig.queue.end(rig.now, Outcome::Released, |_| true).len();
        prop_assert_eq!(left, waiting.len());
        prop_assert!(rig.start <= rig.now && rig.queue.is_empty());
    }
}

#[test]
fn a_timeout_counts_the_same_requests_whatever_the_order_of_the_classes_in_the_file() {
    let check = |names: [(&str, i32); 2]| {
        let mut rig = Rig::new(|settings| {
            settings.classes = names
                .map(|(name, priority)| ClassSettings {
                    name: name.to_owned(),
                    priority,
                    ..ClassSettings::default()
                })
                .into();
            settings.max_wait = Duration::from_secs(1);
        });
        rig.enter(|request| request.priority = 10).unwrap();
        rig.wait(500);
        for _ in 0..20 {
            rig.enter(|request| request.priority = 0).unwrap();
        }
        rig.wait(600);
        let left = rig.queue.advance(rig.now, FULL, 0, |_, _, _| Look::Full);
        let [left] = &left[..] else {
            panic!("{left:?}");
        };
        let Outcome::Refused(refusal) = left.outcome else {
            panic!("{left:?}");
        };
        // The 20 of the lower class come after it.
        assert_eq!(
            (left.waker, refusal.retry_after),
            (1, Duration::from_secs(1))
        );
        assert_eq!(names[left.class].0, "high");
    };
    check([("high", 10), ("low", 0)]);
    check([("low", 0), ("high", 10)]);
}
