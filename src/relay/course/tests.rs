use super::super::failure::cuts::tests::cut;
use super::super::failure::failure_owner::FailureOwner;
use super::*;
use crate::fleet::Member;
use crate::fleet::registry::IDLE_CLOSED_APART;
use crate::fleet::registry::tests::{member, registry};
use crate::relay::settings::Retries;

const A: WorkerId = WorkerId(0);
const B: WorkerId = WorkerId(1);
/// The request itself, and others.
const ALONE: &[u64] = &[0];
const TOGETHER: &[u64] = &[0, 1, 2];
const STOP: Step = Step::Stop(Unanswered::NoFurtherAttempt);

/// A course, and the time of all that happens in it.
struct Rig {
    course: Course,
    now: Instant,
}

fn rig(max_attempts: u32, change: impl FnOnce(&mut Rules)) -> Rig {
    let settings = Settings {
        max_attempts,
        advanced: Retries {
            backoff: Duration::from_millis(100),
            max_backoff: Duration::from_millis(300),
            ..Retries::default()
        },
        ..Settings::default()
    };
    let now = crate::observe::now();
    let mut rules = Rules {
        deadline: now + Duration::from_secs(60),
        looks_for_room: false,
        is_only_one: false,
        may_give_up_transfers: false,
    };
    change(&mut rules);
    let (failed, cuts) = (FailedWorkers::default(), Cuts::default());
    let course = Course::new(&settings, rules, failed, cuts);
    Rig { course, now }
}

fn attempts(max_attempts: u32) -> Rig {
    rig(max_attempts, |_| {})
}

fn fault(stage: Stage, failure: Failure) -> Fault {
    Fault::new(stage, failure, FailureOwner::of_failure(failure, false))
}

fn broken(is_stale: bool) -> Fault {
    let owner = FailureOwner::of_failure(Failure::Broken, is_stale);
    Fault::new(Stage::Worker, Failure::Broken, owner)
}

fn ended(fault: Fault, prefill: Option<WorkerId>) -> Ended {
    Ended {
        fault,
        is_answered: false,
        name: "w".into(),
        worker: A,
        prefill,
    }
}

impl Rig {
    /// The step after one more attempt at a pair of workers, if others that were cut are waited for, after that.
    fn end(&mut self, fault: Fault, is_answered: bool, cut: Option<&Cut>, random: f64) -> Step {
        self.course.on_sent();
        let mut ended = ended(fault, Some(B).filter(|_| fault.stage != Stage::Worker));
        ended.is_answered = is_answered;
        ended.worker = cut.map_or(A, |cut| cut.worker);
        let judgement = self.course.on_failed(self.now, ended, cut, random);
        match judgement.step {
            Step::AwaitOthers(wait) => {
                assert_eq!(wait, COMPANY_WAIT);
                self.course.on_others(self.now, random)
            }
            step => step,
        }
    }

    fn fail(&mut self, failure: Failure, random: f64) -> Step {
        self.end(fault(Stage::Worker, failure), false, None, random)
    }

    /// The step after a connection to the worker was cut.
    fn cut(&mut self, worker: WorkerId, bodies: &[u64], is_stale: bool) -> Step {
        let cut = cut(worker, bodies);
        self.end(broken(is_stale), false, Some(&cut), 0.5)
    }

    /// What the attempt after a pause is a retry of.
    fn retry(&mut self) -> Option<Retry> {
        match self.course.next(self.now) {
            Step::Send { retry, .. } => retry,
            step => panic!("{step:?}"),
        }
    }
}

fn pause(ms: u64) -> Step {
    Step::Pause(Duration::from_millis(ms))
}

fn is_pause(step: &Step) -> bool {
    matches!(step, Step::Pause(_))
}

#[test]
fn the_backoff_doubles_up_to_its_bound_until_the_attempts_are_used_up() {
    let steps = |max_attempts| {
        let mut rig = attempts(max_attempts);
        (0..max_attempts)
            .map(|_| rig.fail(Failure::Connect, 1.0))
            .collect::<Vec<_>>()
    };
    let all = [pause(100), pause(200), pause(300), pause(300), STOP];
    assert_eq!(steps(5), all);
    assert_eq!(steps(1), [STOP]);
}

#[test]
fn jitter_halves_the_backoff_at_most() {
    assert_eq!(attempts(3).fail(Failure::Connect, 0.0), pause(50));
}

#[test]
fn a_request_whose_worker_was_taken_out_goes_to_the_next_one_at_once() {
    let mut rig = attempts(3);
    assert_eq!(rig.fail(Failure::TakenOut, 1.0), pause(0));
    assert!(rig.course.may_have_computed);
    rig.course.on_sent();
    assert!(!rig.course.is_last());
    rig.course.on_sent();
    assert!(rig.course.is_last());
}

#[test]
fn an_engine_may_have_computed_what_it_may_have_read_before_it_closed_a_young_connection() {
    for is_cut in [false, true] {
        let mut rig = attempts(3);
        let fault = Fault {
            is_cut,
            ..broken(true)
        };
        assert!(is_pause(&rig.end(fault, false, None, 0.5)));
        assert_eq!(rig.course.may_have_computed, is_cut);
    }
}

#[test]
fn a_worker_that_was_unreachable_or_taken_out_may_get_the_request_again() {
    for (failure, expected) in [
        (Failure::Local, true),
        (Failure::Connect, true),
        (Failure::Broken, false),
        (Failure::KvTransfer, true),
        (Failure::TimedOut, false),
        (Failure::Refused, false),
        (Failure::TooLong, false),
        (Failure::KeyRefused, false),
        (Failure::TakenOut, true),
    ] {
        let mut rig = attempts(3);
        let _ = if failure == Failure::Broken {
            rig.cut(A, ALONE, false)
        } else {
            rig.fail(failure, 0.5)
        };
        assert_eq!(rig.course.may_repeat_worker(), expected, "{failure:?}");
    }
}

#[test]
fn a_request_that_two_workers_cut_is_not_sent_again_and_never_to_the_same_worker() {
    let mut rig = attempts(9);
    assert_ne!(rig.cut(A, ALONE, false), STOP);
    assert_ne!(rig.fail(Failure::Connect, 0.5), STOP);
    assert!(!rig.course.may_repeat_worker());
    assert_eq!(rig.cut(B, ALONE, false), STOP);
    assert!(rig.course.has_cut_enough());
}

#[test]
fn one_dying_worker_ends_no_request_however_many_connections_it_cuts() {
    // Each as whether it was an idle one.
    for cuts in [
        &[true][..],
        &[false],
        &[true, true],
        &[true, false],
        &[true, true, true, false],
    ] {
        let mut rig = attempts(9);
        for is_stale in cuts {
            assert_ne!(rig.cut(A, ALONE, *is_stale), STOP, "{cuts:?}");
            assert_eq!(rig.course.reuse(), Reuse::Never, "{cuts:?}");
        }
        assert!(!rig.course.has_cut_enough(), "{cuts:?}");
        assert_eq!(rig.cut(B, ALONE, false), STOP, "{cuts:?}");
    }
}

#[test]
fn engines_that_end_with_all_that_they_have_use_up_no_attempts() {
    let mut rig = attempts(2);
    for worker in [A, B] {
        assert_ne!(rig.cut(worker, TOGETHER, false), STOP);
        assert!(rig.course.is_acquitted() && rig.course.may_repeat_worker());
    }
    for expected in [false, true] {
        assert_eq!(rig.fail(Failure::Connect, 0.5) == STOP, expected);
        assert!(!rig.course.is_acquitted());
    }
    let mut carried = self::rig(9, |rules| rules.is_only_one = true);
    assert_eq!(carried.cut(A, TOGETHER, false), STOP);
}

#[test]
fn workers_that_refuse_the_routers_key_use_up_no_attempts_up_to_a_bound() {
    let mut rig = attempts(1);
    for _ in 0..KEYS_REFUSED_MAX {
        assert_eq!(rig.fail(Failure::KeyRefused, 1.0), pause(0));
    }
    assert_eq!(rig.fail(Failure::KeyRefused, 1.0), STOP);
    assert!(rig.course.has_only_refused_keys() && !rig.course.may_have_computed);
    let mut carried = self::rig(9, |rules| rules.is_only_one = true);
    assert_eq!(carried.fail(Failure::KeyRefused, 1.0), STOP);
}

#[test]
fn a_worker_that_refuses_the_routers_key_gets_the_request_in_no_case_again() {
    for (stage, refusing) in [(Stage::Worker, A), (Stage::Prefill, B)] {
        let mut rig = attempts(1);
        let refused = fault(stage, Failure::KeyRefused);
        assert_eq!(rig.end(refused, false, None, 1.0), pause(0));
        // After this one the workers that have failed may get it again.
        assert_eq!(rig.fail(Failure::Connect, 1.0), STOP);
        assert!(rig.course.may_repeat_worker());
        assert_eq!(rig.course.failed.unfit.as_slice(), [refusing]);
        // Not all have refused it, so that it may be asked for later.
        assert!(!rig.course.has_only_refused_keys());
    }
    assert!(!attempts(1).course.has_only_refused_keys());
}

#[test]
fn a_decode_workers_refusal_of_the_key_costs_as_much_as_its_prefill_leg() {
    for (stage, prefill, is_free) in [
        (Stage::Worker, None, true),
        (Stage::Prefill, Some(B), true),
        (Stage::Worker, Some(B), false),
    ] {
        let what = format!("{stage:?} {prefill:?}");
        let refuse = |rig: &mut Rig| {
            rig.course.on_sent();
            let ended = ended(fault(stage, Failure::KeyRefused), prefill);
            rig.course.on_failed(rig.now, ended, None, 0.5).step
        };
        let expected = if is_free { pause(0) } else { STOP };
        assert_eq!(refuse(&mut attempts(1)), expected, "{what}");
        let mut rig = attempts(2);
        assert_eq!(refuse(&mut rig), pause(0), "{what}");
        let is_off_budget = rig.retry().map(|retry| retry.is_off_budget);
        assert_eq!(is_off_budget, Some(is_free), "{what}");
    }
}

/// Workers with these roles.
fn workers(roles: &[Role]) -> Vec<Arc<Worker>> {
    let fleet = registry(&[]);
    let members = roles
        .iter()
        .zip(["a", "b", "c"])
        .map(|(role, name)| Member {
            role: *role,
            ..member(name)
        });
    fleet.set_members("static", members.collect());
    let snapshot = fleet.snapshot();
    let statuses = snapshot.workers.iter();
    statuses.map(|status| status.worker.clone()).collect()
}

#[test]
fn a_key_is_refused_for_good_only_if_each_worker_that_could_have_the_request_refuses_it() {
    use Role::{Both, Decode, Prefill};
    // So many of the workers with these roles refuse it at this stage.
    for (roles, refusing, stage, expected) in [
        (&[Both][..], 1, Stage::Worker, true),
        (&[Both, Both][..], 1, Stage::Worker, false),
        (&[Both, Both][..], 2, Stage::Worker, true),
        (&[Decode, Prefill][..], 1, Stage::Worker, true),
        (&[Decode, Both][..], 1, Stage::Worker, false),
        (&[Prefill, Decode][..], 1, Stage::Prefill, true),
        (&[Prefill, Both][..], 1, Stage::Prefill, false),
        (&[Prefill, Prefill, Decode][..], 1, Stage::Prefill, false),
        (&[][..], 0, Stage::Worker, false),
    ] {
        let (workers, mut rig) = (workers(roles), attempts(1));
        for worker in &workers[..refusing] {
            rig.course.on_sent();
            let prefill = Some(worker.id).filter(|_| stage == Stage::Prefill);
            let ended = Ended {
                worker: prefill.map_or(worker.id, |_| WorkerId(99)),
                ..ended(fault(stage, Failure::KeyRefused), prefill)
            };
            let _ = rig.course.on_failed(rig.now, ended, None, 0.5);
        }
        let is_for_good = |rig: &Rig| {
            rig.course
                .is_refused_by_each(stage, workers.iter(), |_| false)
        };
        assert_eq!(is_for_good(&rig), expected, "{roles:?} {stage:?}");
        // Whatever else has failed may be over soon.
        let _ = rig.fail(Failure::Connect, 0.5);
        assert!(!is_for_good(&rig), "{roles:?} {stage:?}");
    }
}

#[test]
fn a_key_is_refused_for_good_also_where_earlier_requests_found_it_out() {
    let (workers, mut rig) = (workers(&[Role::Both; 3]), attempts(1));
    let is_for_good = |rig: &Rig, refusing: &[WorkerId]| {
        let refuses = |worker: &Worker| refusing.contains(&worker.id);
        rig.course
            .is_refused_by_each(Stage::Worker, workers.iter(), refuses)
    };
    let all: Vec<WorkerId> = workers.iter().map(|worker| worker.id).collect();
    // This request has to be refused as well.
    assert!(!is_for_good(&rig, &all));
    rig.course.on_sent();
    let ended = Ended {
        worker: all[0],
        ..ended(fault(Stage::Worker, Failure::KeyRefused), None)
    };
    let _ = rig.course.on_failed(rig.now, ended, None, 0.5);
    assert!(!is_for_good(&rig, &all[..2]));
    assert!(is_for_good(&rig, &all[1..]));
}

#[test]
fn a_worker_that_closed_an_idle_connection_may_get_the_request_over_a_new_one() {
    let mut rig = attempts(9);
    assert_eq!(rig.course.reuse(), Reuse::Replaced);
    let _ = rig.cut(A, ALONE, true);
    assert!(rig.course.may_repeat_worker());
    // Another one is unreachable.
    let _ = rig.fail(Failure::Connect, 0.5);
    assert!(rig.course.may_repeat_worker());
    assert_eq!(rig.course.reuse(), Reuse::Never);
}

#[test]
fn a_request_whose_time_is_over_is_not_tried_again() {
    assert_eq!(attempts(9).fail(Failure::Deadline, 0.5), STOP);
}

#[test]
fn others_that_were_cut_are_waited_for_before_a_request_is_refused() {
    for (max_attempts, is_waited_for) in [(1, true), (9, false)] {
        let mut rig = attempts(max_attempts);
        rig.course.on_sent();
        let (ended, cut) = (ended(broken(false), None), cut(A, ALONE));
        let judgement = rig.course.on_failed(rig.now, ended, Some(&cut), 0.5);
        let waits = judgement.step == Step::AwaitOthers(COMPANY_WAIT);
        assert_eq!(waits, is_waited_for);
        assert_eq!(rig.course.cuts.workers(), [A]);
    }
}

/// Two attempts are allowed, after the first of which there is a pause, and `expected` after the second.
fn check((stage, failure, is_answered): (Stage, Failure, bool), may_give_up: bool, expected: Step) {
    let mut rig = rig(2, |rules| rules.may_give_up_transfers = may_give_up);
    let fault = fault(stage, failure);
    assert!(is_pause(&rig.end(fault, is_answered, None, 0.5)));
    let gives_up = expected == Step::GiveUpTransfers;
    let what = format!("{stage:?} {failure:?} {is_answered} {may_give_up}");
    assert_eq!(rig.end(fault, is_answered, None, 0.5), expected, "{what}");
    assert_eq!(rig.course.failed.gave_up_transfers, gives_up, "{what}");
}

#[test]
fn a_worker_that_fails_is_replaced_until_the_attempts_are_used_up() {
    for may_give_up in [false, true] {
        check((Stage::Worker, Failure::Connect, false), may_give_up, STOP);
        check((Stage::Worker, Failure::Refused, true), may_give_up, STOP);
    }
}

#[test]
fn a_pair_is_replaced_by_another_and_then_by_one_worker() {
    let prefill = (Stage::Prefill, Failure::Connect, false);
    check(prefill, true, Step::GiveUpTransfers);
    check(prefill, false, STOP);
    let transfer = (Stage::Transfer, Failure::TimedOut, false);
    check(transfer, true, Step::GiveUpTransfers);
}

#[test]
fn after_a_decode_engines_refusal_no_other_pair_is_tried() {
    let refused = (Stage::Transfer, Failure::KvTransfer, true);
    check(refused, false, STOP);
    let mut rig = rig(2, |rules| rules.may_give_up_transfers = true);
    for _ in 0..2 {
        rig.course.failed.gave_up_transfers = false;
        let refused = fault(Stage::Transfer, Failure::KvTransfer);
        assert_eq!(rig.end(refused, true, None, 0.5), Step::GiveUpTransfers);
    }
}

#[test]
fn transfers_are_given_up_once() {
    let mut rig = rig(3, |rules| rules.may_give_up_transfers = true);
    let refused = fault(Stage::Transfer, Failure::KvTransfer);
    assert_eq!(rig.end(refused, true, None, 0.5), Step::GiveUpTransfers);
    assert_eq!(rig.retry(), None);
    assert!(is_pause(&rig.end(refused, true, None, 0.5)));
}

#[test]
fn nothing_is_tried_when_the_time_is_over() {
    let mut rig = rig(2, |rules| {
        rules.may_give_up_transfers = true;
        rules.deadline = rules.deadline - Duration::from_secs(60) + Duration::from_millis(1);
    });
    let prefill = fault(Stage::Prefill, Failure::Connect);
    // The pause would end too late, and one worker may begin now.
    assert_eq!(rig.end(prefill, false, None, 1.0), Step::GiveUpTransfers);
    rig.now += Duration::from_secs(1);
    rig.course.failed.gave_up_transfers = false;
    assert_eq!(rig.course.on_others(rig.now, 1.0), STOP);
    assert_eq!(rig.course.owed, None);
    let late = Step::Stop(Unanswered::Late);
    assert_eq!(rig.course.next(rig.now), late);
}

#[test]
fn a_retry_is_owed_once_unless_it_costs_nothing() {
    for (fault, expected) in [
        (fault(Stage::Worker, Failure::Connect), Some(false)),
        (fault(Stage::Worker, Failure::TooLong), Some(true)),
        (fault(Stage::Worker, Failure::KeyRefused), Some(true)),
        (broken(true), None),
        (fault(Stage::Worker, Failure::Local), None),
        (fault(Stage::Worker, Failure::TakenOut), None),
    ] {
        let mut rig = attempts(2);
        let step = rig.end(fault, false, None, 0.5);
        assert!(is_pause(&step), "{fault:?}");
        let owed = rig.retry().map(|retry| retry.is_off_budget);
        assert_eq!(owed, expected, "{fault:?}");
        assert_eq!(rig.retry(), None);
    }
}

#[test]
fn a_request_looks_for_room_before_its_first_attempt_and_after_a_refused_key() {
    let mut rig = rig(2, |rules| rules.looks_for_room = true);
    let now = rig.now;
    let send = Step::Send {
        at: now,
        retry: None,
    };
    assert_eq!(rig.course.next(now), Step::FindRoom);
    assert_eq!(rig.course.on_room(now), send);
    assert_eq!(rig.course.on_no_worker(true), Step::FindRoom);
    assert_eq!(rig.course.next(now), Step::FindRoom);
    assert!(is_pause(&rig.fail(Failure::KeyRefused, 0.5)));
    assert_eq!(rig.course.next(now), Step::FindRoom);
    // What it is a retry of is kept meanwhile.
    match rig.course.on_room(now) {
        Step::Send { retry, .. } => assert!(retry.is_some()),
        step => panic!("{step:?}"),
    }
    assert!(is_pause(&rig.fail(Failure::TakenOut, 0.5)));
    assert_eq!(rig.course.next(now), send);
    assert_eq!(rig.course.on_no_worker(false), STOP);
}

#[test]
fn a_worker_that_fails_a_request_again_counts_once() {
    let mut rig = attempts(9);
    let mut is_counted = |fault: Fault, prefill| {
        rig.course.on_sent();
        let ended = ended(fault, prefill);
        let judgement = rig.course.on_failed(rig.now, ended, None, 0.5);
        judgement.is_counted
    };
    let connect = fault(Stage::Worker, Failure::Connect);
    assert!(is_counted(connect, None));
    assert!(!is_counted(connect, None));
    // Over a new connection it is asked anew.
    assert!(!is_counted(broken(true), None));
    assert!(is_counted(connect, None));
    // The prefill worker has not failed yet.
    let transfer = fault(Stage::Transfer, Failure::KvTransfer);
    assert!(is_counted(transfer, Some(B)));
    assert!(!is_counted(transfer, Some(B)));
    // Always the router's own.
    for _ in 0..2 {
        assert!(is_counted(fault(Stage::Worker, Failure::Local), None));
    }
}

#[test]
fn idle_connections_are_closed_between_two_attempts_that_lack_descriptors() {
    // A pause is at least half of its backoff.
    assert!(IDLE_CLOSED_APART < Retries::default().backoff / 2);
}
