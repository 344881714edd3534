//! Runs the models, each in all its interleavings. Ends with an error at the first one that goes wrong.

// Only a part of the index is used here.
#![allow(dead_code, unused_imports, clippy::all)]

mod kv;

mod ids {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub struct WorkerId(pub u32);

    impl std::fmt::Display for WorkerId {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{}", self.0)
        }
    }
}

fn main() {
    let only = std::env::args().nth(1).unwrap_or_default();
    for (name, model) in kv::index::models::ALL {
        if name.contains(&only) {
            let started = std::time::Instant::now();
            let runs = model();
            println!("{name}: {runs} interleavings in {:.1} s", started.elapsed().as_secs_f64());
        }
    }
}
