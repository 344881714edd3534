//! What the API server and the network do wrong, and that the router's workers are right all the same.

use super::fake::FakeApi;
use super::*;

const SHORT: Duration = Duration::from_secs(2);

/// As [`vllm`], with everything listed again at least every two seconds.
fn relisting() -> Settings {
    let mut entry = vllm();
    entry.advanced.relist_interval = SHORT;
    entry
}

async fn serving(entry: Settings, names: &[&str]) -> (FakeApi, Routed) {
    let api = FakeApi::start().await;
    put_pods(&api, names);
    let router = Routed::start(&api, entry).await;
    router.serves(names).await;
    (api, router)
}

#[tokio::test]
async fn a_lost_deletion_is_made_up_for_within_one_relist_period() {
    let (api, router) = serving(relisting(), &["a", "b"]).await;
    let watches = api.count("watch", "pods");
    api.delete_unnoticed("pods", "a");
    eventually("the dead pod is gone", async || router.serving() == ["b"]).await;
    assert!(
        router
            .metric("warmroute_kubernetes_lost_events_total", "")
            .await
            >= 1.0
    );
    eventually("a watch that loses events is replaced", async || {
        api.count("watch", "pods") > watches
    })
    .await;
}

#[tokio::test]
async fn lost_additions_and_changes_are_made_up_for_too() {
    let (api, router) = serving(relisting(), &["a", "b"]).await;
    api.put_unnoticed("pods", named_pod("c"));
    api.put_unnoticed("pods", with_ready(named_pod("a"), false));
    router.serves(&["b", "c"]).await;
}

#[tokio::test]
async fn a_watch_that_says_nothing_is_made_up_for() {
    let (api, router) = serving(relisting(), &["a"]).await;
    api.set(|faults| faults.mute = true);
    api.drop_connections();
    put_pods(&api, &["b"]);
    router.serves(&["a", "b"]).await;
    api.delete("pods", "a");
    router.serves(&["b"]).await;
}

#[tokio::test]
async fn relists_that_find_nothing_change_nothing() {
    let (api, router) = serving(relisting(), &["a", "b", "c", "d"]).await;
    let ids = || {
        let snapshot = router.app.fleet().snapshot();
        snapshot
            .workers
            .iter()
            .map(|status| status.worker.id)
            .collect::<Vec<_>>()
    };
    let before = ids();
    let lists = api.count("list", "pods");
    eventually("two relists", async || {
        api.count("list", "pods") >= lists + 4
    })
    .await;
    assert_eq!(ids(), before, "the same workers, with their load");
    assert_eq!(
        router
            .metric("warmroute_kubernetes_lost_events_total", "")
            .await,
        0.0
    );
    assert!(
        router
            .metric("warmroute_kubernetes_list_age_seconds", "")
            .await
            < 60.0
    );
}

#[tokio::test]
async fn a_slow_relist_does_not_hold_up_the_watch() {
    let (api, router) = serving(relisting(), &["a", "b"]).await;
    let lists = api.count("list", "pods");
    api.set(|faults| faults.list_delay = Duration::MAX);
    eventually("a relist has begun", async || {
        api.count("list", "pods") > lists
    })
    .await;
    // Both happen while the list is on its way, and are newer than what it may show.
    api.delete("pods", "a");
    put_pods(&api, &["c"]);
    eventually("the watch is followed", async || {
        router.serving() == ["b", "c"]
    })
    .await;
    api.set(|faults| faults.list_delay = Duration::ZERO);
    router.keeps_serving(&["b", "c"], SHORT).await;
}

#[tokio::test]
async fn relists_that_fail_do_not_hold_up_the_watch() {
    let mut entry = relisting();
    // Each failure doubles the pause: if the watch waited for it, too, the changes would take longer than the test may.
    entry.advanced.max_retry_pause = Duration::from_secs(600);
    let (api, router) = serving(entry, &["a"]).await;
    api.set(|faults| faults.forbidden = vec![("list", "pods")]);
    eventually("a relist has failed", async || {
        router
            .metric("warmroute_kubernetes_failures_total", "forbidden")
            .await
            >= 1.0
    })
    .await;
    for is_ready in [false, true].repeat(10) {
        api.put("pods", with_ready(named_pod("a"), is_ready));
        let expected: &[&str] = if is_ready { &["a"] } else { &[] };
        router.serves(expected).await;
    }
}

#[tokio::test]
async fn a_watch_that_is_too_old_lists_again_and_removes_what_is_gone() {
    for gone_as_status in [false, true] {
        let (mut api, router) = serving(vllm(), &["a", "b"]).await;
        api.set(|faults| faults.gone_as_status = gone_as_status);
        api.stop();
        api.delete("pods", "a");
        put_pods(&api, &["c"]);
        api.compact();
        router
            .keeps_serving(&["a", "b"], Duration::from_millis(300))
            .await;
        api.listen().await;
        router.serves(&["b", "c"]).await;
        // The connection stays, the version does not.
        put_pods(&api, &["d"]);
        router.serves(&["b", "c", "d"]).await;
        api.compact();
        api.delete_unnoticed("pods", "b");
        api.drop_connections();
        router.serves(&["c", "d"]).await;
    }
}

#[tokio::test]
async fn broken_watches_go_on_where_they_were() {
    let (api, router) = serving(vllm(), &["a"]).await;
    for _ in 0..3 {
        api.drop_connections();
        put_pods(&api, &["b"]);
        router.serves(&["a", "b"]).await;
        api.drop_connections();
        api.delete("pods", "b");
        router.serves(&["a"]).await;
    }
    assert!(api.count("watch", "pods") >= 4);
}

#[tokio::test]
async fn while_the_api_server_is_away_the_workers_stay() {
    let (mut api, router) = serving(vllm(), &["a", "b"]).await;
    for round in 0..2 {
        api.stop();
        let (gone, come) = if round == 0 { ("a", "c") } else { ("c", "a") };
        api.delete("pods", gone);
        put_pods(&api, &[come]);
        let before = if round == 0 { ["a", "b"] } else { ["b", "c"] };
        router
            .keeps_serving(&before, Duration::from_millis(500))
            .await;
        api.listen().await;
        let after = if round == 0 { ["b", "c"] } else { ["a", "b"] };
        router.serves(&after).await;
    }
}

#[tokio::test]
async fn an_incomplete_list_removes_nothing() {
    let (mut api, router) = serving(vllm(), &["a", "b", "c", "d"]).await;
    api.stop();
    api.delete("pods", "d");
    put_pods(&api, &["e", "f"]);
    api.compact();
    api.set(|faults| faults.failing_page = Some(1));
    api.listen().await;
    let lists = api.count("list", "pods");
    eventually("lists fail on their second page", async || {
        api.count("list", "pods") >= lists + 6
    })
    .await;
    assert_eq!(router.serving(), ["a", "b", "c", "d"]);
    api.set(|faults| faults.failing_page = None);
    router.serves(&["a", "b", "c", "e", "f"]).await;
}

#[tokio::test]
async fn a_complete_list_without_workers_is_believed() {
    let (api, router) = serving(relisting(), &["a", "b"]).await;
    api.set(|faults| faults.unavailable = true);
    api.delete_unnoticed("pods", "a");
    api.delete_unnoticed("pods", "b");
    router.keeps_serving(&["a", "b"], SHORT).await;
    api.set(|faults| faults.unavailable = false);
    router.serves(&[]).await;
}

#[tokio::test]
async fn watches_that_end_at_once_are_not_opened_again_and_again() {
    let (api, router) = serving(relisting(), &["a"]).await;
    api.set(|faults| faults.ends_watches = true);
    api.drop_connections();
    eventually("they are counted", async || {
        let failures = "warmroute_kubernetes_failures_total";
        router.metric(failures, "ended_at_once").await >= 2.0
    })
    .await;
    // The complete lists still say what is there.
    put_pods(&api, &["b"]);
    router.serves(&["a", "b"]).await;
    let watches = api.count("watch", "pods");
    assert!(watches < 40, "{watches}");
    api.set(|faults| faults.ends_watches = false);
    put_pods(&api, &["c"]);
    router.serves(&["a", "b", "c"]).await;
}

#[tokio::test]
async fn a_server_that_names_a_time_is_not_asked_before() {
    let (api, router) = serving(vllm(), &["a"]).await;
    api.set(|faults| faults.retry_after = Some(3));
    api.drop_connections();
    let asked = || api.count("watch", "pods") + api.count("list", "pods");
    let before = asked();
    eventually("it was refused", async || asked() > before).await;
    let refused = asked();
    // Well before that time is over, so that a slow machine does not reach it.
    router.keeps_serving(&["a"], SHORT / 2).await;
    // One more may have been under way.
    assert!(asked() <= refused + 1, "{} {refused}", asked());
    api.set(|faults| faults.retry_after = None);
    put_pods(&api, &["b"]);
    router.serves(&["a", "b"]).await;
}

#[tokio::test]
async fn a_list_whose_pages_always_expire_is_asked_for_in_one_piece() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "b", "c"]);
    api.set(|faults| faults.continue_expires = true);
    let mut entry = vllm();
    entry.advanced.page_size = 1;
    let router = Routed::start(&api, entry).await;
    router.serves(&["a", "b", "c"]).await;
    let failures = "warmroute_kubernetes_failures_total";
    assert!(router.metric(failures, "gone").await >= 1.0);
}

#[tokio::test]
async fn a_list_that_never_ends_fails_and_is_tried_again() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a"]);
    api.set(|faults| faults.list_delay = Duration::from_secs(3_600));
    let mut entry = vllm();
    entry.advanced.list_timeout = Duration::from_millis(300);
    let router = Routed::start(&api, entry).await;
    eventually("the list has failed", async || {
        router
            .metric("warmroute_kubernetes_failures_total", "timeout")
            .await
            >= 1.0
    })
    .await;
    api.set(|faults| faults.list_delay = Duration::ZERO);
    router.serves(&["a"]).await;
}

#[tokio::test]
async fn a_worker_that_does_not_answer_holds_up_nothing() {
    // Connections are accepted by the kernel, and nothing ever answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let api = FakeApi::start().await;
    let file = kubeconfig(&api, &json!({}));
    let router = Routed::with_kubeconfig(file, vllm(), |config| {
        config.fleet.health.timeout = Duration::from_secs(600);
    })
    .await;
    api.put("pods", pod("silent", "127.0.0.1", address.port()));
    router.serves(&["silent"]).await;
    for _ in 0..3 {
        put_pods(&api, &["a"]);
        eventually("it joins", async || router.serving() == ["a", "silent"]).await;
        api.delete("pods", "a");
        eventually("it leaves", async || router.serving() == ["silent"]).await;
    }
    drop(silent);
}

/// A pod whose port is none.
fn unreadable(name: &str) -> Value {
    let mut pod = named_pod(name);
    pod["spec"]["containers"] = json!([{"ports": [{"name": "http", "containerPort": "eighty"}]}]);
    pod
}

const UNREADABLE: &str = "warmroute_kubernetes_unreadable_objects_total";

#[tokio::test]
async fn an_object_that_cannot_be_read_costs_itself_alone_in_the_first_list() {
    let api = FakeApi::start().await;
    put_pods(&api, &["a", "c"]);
    api.put("pods", unreadable("b"));
    let mut labels = named_pod("d");
    labels["metadata"]["labels"]["other"] = json!([1]);
    api.put("pods", labels);
    for page_size in [0, 1, 3] {
        let mut entry = relisting();
        entry.advanced.page_size = page_size;
        let router = Routed::start(&api, entry).await;
        router.serves(&["a", "c"]).await;
        assert!(router.metric(UNREADABLE, "").await >= 2.0);
    }
}

#[tokio::test]
async fn an_object_that_cannot_be_read_any_more_stays_as_it_was() {
    let (api, router) = serving(relisting(), &["a", "b"]).await;
    let watches = api.count("watch", "pods");
    api.put("pods", unreadable("b"));
    api.put("pods", unreadable("new"));
    put_pods(&api, &["c"]);
    router.serves(&["a", "b", "c"]).await;
    // Over several complete lists.
    router.keeps_serving(&["a", "b", "c"], SHORT * 2).await;
    assert_eq!(api.count("watch", "pods"), watches, "no watch was lost");
    let lost = "warmroute_kubernetes_lost_events_total";
    assert_eq!(router.metric(lost, "").await, 0.0);
    // It can be read again, or is gone.
    api.put("pods", with_ready(named_pod("b"), false));
    put_pods(&api, &["new"]);
    router.serves(&["a", "c", "new"]).await;
    api.put("pods", unreadable("a"));
    api.delete("pods", "a");
    router.serves(&["c", "new"]).await;
}
