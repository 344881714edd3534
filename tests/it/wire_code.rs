//! `proto/generated` is what the schemas say: Rust code of the protobuf messages, made with nothing to install. It is committed, so
//! that a build compiles no compiler of schemas. Of the services only the paths of their calls come out; calling and serving is a
//! few lines over tonic, and the same for all of them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// KV events, as several engines serve them.
const KV_EVENTS: [&str; 5] = [
    "kv_events.proto",
    "vllm.proto",
    "sglang.proto",
    "tokenspeed.proto",
    "trtllm.proto",
];

#[test]
fn the_committed_code_is_what_the_schemas_say() {
    let committed = proto().join("generated");
    let code = generated();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let _ = fs::remove_dir_all(&committed);
        fs::create_dir_all(&committed).unwrap();
        for (name, text) in &code {
            fs::write(committed.join(name), text).unwrap();
        }
    }
    assert!(
        code == files(&committed),
        "proto/generated differs from the schemas; write it again with\n\n    \
         UPDATE_DOCS=1 cargo test --test it wire_code\n"
    );
}

fn proto() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("proto")
}

/// The generated files by name.
fn generated() -> BTreeMap<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let config = || {
        let mut config = prost_build::Config::new();
        config
            .out_dir(folder.path())
            .service_generator(Box::new(CallPaths));
        config
    };
    let schemas = |names: &[&str]| protox::compile(names, [proto()]).unwrap();
    config()
        .include_file("kv_events.rs")
        .compile_fds(schemas(&KV_EVENTS))
        .unwrap();
    config().compile_fds(schemas(&["peers.proto"])).unwrap();
    // Bodies pass through, so that they are not copied.
    config()
        .bytes(["."])
        .compile_fds(schemas(&["ext_proc.proto"]))
        .unwrap();
    let mut code = files(folder.path());
    // It includes the others from beside it, not from a build script's folder.
    let includes = code.get_mut("kv_events.rs").unwrap();
    *includes = includes
        .replace("concat!(env!(\"OUT_DIR\"), \"/", "\"")
        .replace("\"))", "\")");
    code
}

fn files(folder: &Path) -> BTreeMap<String, String> {
    let files = fs::read_dir(folder).into_iter().flatten();
    files
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(&path).unwrap())
        })
        .collect()
}

/// Writes `pub const SUBSCRIBE_KV_EVENTS: &str = "/package.Service/SubscribeKvEvents";` and the like.
struct CallPaths;

impl prost_build::ServiceGenerator for CallPaths {
    fn generate(&mut self, service: prost_build::Service, code: &mut String) {
        for method in service.methods {
            let (package, name, call) = (&service.package, &service.proto_name, &method.proto_name);
            let constant = method.name.to_uppercase();
            writeln!(
                code,
                "pub const {constant}: &str = \"/{package}.{name}/{call}\";"
            )
            .unwrap();
        }
    }
}
