//! Protobuf messages -> Rust, with nothing to install: the schemas are compiled in this process.
//! Of the services only the paths of their calls come out; calling and serving is a few lines over
//! tonic, and the same for all of them.

use std::error::Error;
use std::fmt::Write;

/// KV events, as several engines serve them.
const KV_EVENTS: [&str; 5] = [
    "kv_events.proto",
    "vllm.proto",
    "sglang.proto",
    "tokenspeed.proto",
    "trtllm.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    prost_build::Config::new()
        .service_generator(Box::new(Paths))
        .include_file("wire.rs")
        .compile_fds(protox::compile(KV_EVENTS, ["proto"])?)?;
    // Written to `warmroute.peers.v1.rs`.
    prost_build::Config::new()
        .service_generator(Box::new(Paths))
        .compile_fds(protox::compile(["peers.proto"], ["proto"])?)?;
    // Bodies pass through, so that they are not copied. Written to `envoy.service.ext_proc.v3.rs`.
    prost_build::Config::new()
        .bytes(["."])
        .service_generator(Box::new(Paths))
        .compile_fds(protox::compile(["ext_proc.proto"], ["proto"])?)?;
    Ok(())
}

/// Writes `pub const SUBSCRIBE_KV_EVENTS: &str = "/package.Service/SubscribeKvEvents";` and the like.
struct Paths;

impl prost_build::ServiceGenerator for Paths {
    fn generate(&mut self, service: prost_build::Service, code: &mut String) {
        for method in service.methods {
            let (package, name, call) = (&service.package, &service.proto_name, &method.proto_name);
            let constant = method.name.to_uppercase();
            writeln!(
                code,
                "pub const {constant}: &str = \"/{package}.{name}/{call}\";"
            )
            .expect("a String takes everything");
        }
    }
}
