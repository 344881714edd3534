//! Many pods that come, go and change all the time: the router's workers are the pods that there are.

use std::collections::BTreeMap;

use super::fake::FakeApi;
use super::*;
use crate::patience::too_long;

/// A pod as it should be seen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Truth {
    number: u32,
    is_ready: bool,
}

#[derive(Debug)]
struct Churn {
    api: FakeApi,
    router: Routed,
    pods: BTreeMap<String, Truth>,
    created: u32,
    random: fastrand::Rng,
}

fn address(number: u32) -> String {
    let [_, b, c, d] = (number % 0x00ff_0000 + 0x0001_0001).to_be_bytes();
    format!("127.{}.{c}.{d}", b.max(1))
}

impl Churn {
    async fn start(count: u32, relist_interval: Duration) -> Self {
        let api = FakeApi::start().await;
        let mut entry = vllm();
        entry.advanced.relist_interval = relist_interval;
        entry.advanced.page_size = 250;
        let file = kubeconfig(&api, &json!({}));
        let router = Routed::with_kubeconfig(file, entry, |config| {
            // None of the pods has an engine; probes would take the machine from what is measured.
            config.fleet.health.interval = Duration::from_secs(600);
        })
        .await;
        let seed = fastrand::u64(..);
        eprintln!("seed {seed}");
        let mut churn = Self {
            api,
            router,
            pods: BTreeMap::new(),
            created: 0,
            random: fastrand::Rng::with_seed(seed),
        };
        for _ in 0..count {
            churn.create();
        }
        eventually("all pods are workers", async || churn.is_right()).await;
        churn
    }

    fn put(&self, name: &str, pod: Truth) {
        let object = super::pod(name, &address(pod.number), 9);
        self.api.put("pods", with_ready(object, pod.is_ready));
    }

    fn create(&mut self) {
        self.created += 1;
        let pod = Truth {
            number: self.created,
            is_ready: true,
        };
        let name = format!("pod-{:06}", self.created);
        self.put(&name, pod);
        self.pods.insert(name, pod);
    }

    fn any(&mut self) -> String {
        let index = self.random.usize(..self.pods.len());
        self.pods.keys().nth(index).unwrap().clone()
    }

    /// One thing that happens in a cluster.
    fn step(&mut self) {
        let name = self.any();
        match self.random.u8(..4) {
            // A rollout: one goes, another comes.
            0 | 1 => {
                self.pods.remove(&name);
                self.api.delete("pods", &name);
                self.create();
            }
            2 => {
                let mut pod = self.pods[&name];
                pod.is_ready = !pod.is_ready;
                self.put(&name, pod);
                self.pods.insert(name, pod);
            }
            _ => {
                self.created += 1;
                let mut pod = self.pods[&name];
                pod.number = self.created;
                self.put(&name, pod);
                self.pods.insert(name, pod);
            }
        }
    }

    fn is_right(&self) -> bool {
        let workers = self.router.workers();
        workers.len() == self.pods.len()
            && workers.iter().all(|(name, (at, is_draining))| {
                let pod = self.pods.get(name);
                pod.is_some_and(|pod| {
                    *at == format!("{}:9", address(pod.number)) && *is_draining != pod.is_ready
                })
            })
    }

    /// How long it takes until the router's workers are right.
    async fn settle(&self) -> Duration {
        let started = Instant::now();
        while !self.is_right() {
            assert!(started.elapsed() < too_long(), "never right");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        started.elapsed()
    }

    /// Steps at this pace, each of which must be seen. Returns the times that took, sorted.
    async fn run(&mut self, steps: usize, pace: Duration) -> Vec<Duration> {
        let mut next = Instant::now();
        let mut lags = Vec::new();
        for _ in 0..steps {
            // If a step was seen late, the next ones make up for it.
            next += pace;
            self.step();
            lags.push(self.settle().await);
            tokio::time::sleep_until(next.into()).await;
        }
        lags.sort();
        lags
    }

    /// A deletion that no watch reports, and how long the router keeps the pod.
    async fn lose_a_deletion(&mut self) -> Duration {
        let name = self.any();
        self.pods.remove(&name);
        self.api.delete_unnoticed("pods", &name);
        let settled = self.settle().await;
        self.create();
        self.settle().await;
        settled
    }
}

fn report(lags: &[Duration]) {
    let at = |share: f64| lags[((lags.len() - 1) as f64 * share) as usize];
    eprintln!(
        "{} steps: median {:?}, p99 {:?}, longest {:?}",
        lags.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_follow_200_pods_that_change_all_the_time() {
    // Nothing is listed again: what is seen is what a watch reported.
    let mut churn = Churn::start(200, 10 * too_long()).await;
    report(&churn.run(60, Duration::from_millis(10)).await);
    let mut churn = Churn::start(20, Duration::from_millis(300)).await;
    let lost = churn.lose_a_deletion().await;
    eprintln!("a lost deletion was seen after {lost:?}");
}

/// `cargo test --release --features kubernetes --test it -- --ignored --nocapture 1000_pods`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes more than five minutes"]
async fn workers_follow_1000_pods_that_change_20_times_a_second_for_5_minutes() {
    let relist_interval = Duration::from_secs(20);
    let mut churn = Churn::start(1_000, relist_interval).await;
    let mut lags = Vec::new();
    let mut lost = Vec::new();
    for _ in 0..5 {
        lags.extend(churn.run(1_200, Duration::from_millis(50)).await);
        lost.push(churn.lose_a_deletion().await);
    }
    lags.sort();
    report(&lags);
    eprintln!("lost deletions were seen after {lost:?}, relist interval {relist_interval:?}");
}
