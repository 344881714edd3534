//! How long tests wait for what must come: far longer than it takes. Machines that are slower still, or very busy, multiply
//! that by `WARMROUTE_TEST_TIMEOUT_FACTOR`. No test fails because something took long, only because it never came.

use std::sync::LazyLock;
use std::time::Duration;

/// No answer takes this long; it only separates a hang from an answer.
pub(crate) fn too_long() -> Duration {
    scaled(Duration::from_secs(60))
}

/// A time of a test, on this machine.
pub(crate) fn scaled(time: Duration) -> Duration {
    static FACTOR: LazyLock<f64> = LazyLock::new(|| {
        let text = std::env::var("WARMROUTE_TEST_TIMEOUT_FACTOR").unwrap_or_default();
        if text.is_empty() {
            1.0
        } else {
            text.parse().expect("a number, such as 3 or 1.5")
        }
    });
    time.mul_f64(*FACTOR)
}
