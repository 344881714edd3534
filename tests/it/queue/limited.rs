//! Requests of tenants with limits that wait in the router.

use serde_json::json;
use warmroute::openai::tenant::TenantSpec;
use warmroute::secret::Secret;

use super::*;

fn tenant(name: &str, limits: Value) -> TenantSpec {
    TenantSpec {
        name: name.to_owned(),
        keys: vec![Secret::new(name)],
        limits: serde_json::from_value(limits).unwrap(),
        ..TenantSpec::default()
    }
}

async fn as_tenant(cluster: &Cluster, path: &str, name: &str) -> Value {
    let page = cluster.admin(path).await.json();
    let rows = match path {
        "/fleet" => page["limits"]["closest"].as_array(),
        _ => page["tenants"].as_array(),
    };
    let mut rows = rows.unwrap().iter();
    rows.find(|row| row["name"] == name).cloned().unwrap()
}

#[tokio::test]
async fn what_the_queue_refuses_and_who_leaves_it_is_not_charged() {
    let cluster = Cluster::start(vec![fast()], |config| {
        with_queue(config, |settings| settings.max_requests = 1);
        // What a request took comes back by itself after a minute, so that the test sees what is given back.
        let limits = json!({"requests_per_minute": 1, "tokens_per_minute": 100000, "burst": "6m",
            "concurrent_requests": 5});
        config.tenants = vec![tenant("a", limits), tenant("blocker", Value::Null)];
    })
    .await;
    set_hang(&cluster, true).await;
    let key = [("authorization", "Bearer blocker")];
    let _blocker = send(&cluster, &key, chat(&"busy ".repeat(20), 2, true));
    eventually("the worker is busy", async || {
        cluster.requests().await == [1]
    })
    .await;
    set_hang(&cluster, false).await;
    let left = async || {
        let row = as_tenant(&cluster, "/tenants", "a").await;
        let left: Vec<Value> = [0, 1]
            .map(|at| row["limits"][at]["remaining"].clone())
            .into();
        (left, row["running_requests"].clone())
    };
    let full = || (vec![json!(6), json!(600_000)], json!(0));
    let key = [("authorization", "Bearer a")];
    let waiter = wait(&cluster, &key, chat("hello", 1, false)).await;
    // It is reserved while it waits.
    let (reserved, running) = left().await;
    assert_eq!((&reserved[0], running), (&json!(5), json!(1)));
    let fleet = cluster.admin("/fleet").await.json();
    assert_eq!(fleet["queue"]["is_on"], true, "{fleet}");
    assert_eq!(fleet["queue"]["waiting"], 1, "{fleet}");
    let row = &fleet["queue"]["models"][0];
    assert_eq!((&row["model"], &row["waiting"]), (&json!("sim"), &json!(1)));
    assert!(row["saturation"].as_f64().unwrap() >= 1.0, "{row}");
    assert_eq!(fleet["limits"]["tenants"], 1, "{fleet}");
    assert_eq!(fleet["limits"]["is_alone"], true, "{fleet}");
    let row = as_tenant(&cluster, "/fleet", "a").await;
    assert_eq!(row["running_requests"], 1);
    let tightest = (&row["tightest"]["limit"], &row["tightest"]["remaining"]);
    assert_eq!(tightest, (&json!("requests_per_minute"), &json!(5)));
    for _ in 0..3 {
        let refused = send(&cluster, &key, chat("one too many", 1, false));
        let refused = refused.answer().await;
        assert_eq!((refused.status, &*refused.code()), (429, "queue_full"));
        assert_eq!(refused.header("x-ratelimit-limit-requests"), "6");
    }
    drop(waiter);
    eventually("everything is given back", async || left().await == full()).await;
}
