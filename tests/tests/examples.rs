//! The clients in other languages that the protocol's page points to, on the real daemon.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::process::Output;

use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{World, binaries, users};

fn run(world: &World, interpreter: &str, script: &str, mode: &str, command: &str) -> Output {
    let script = binaries::repository().join("client/examples").join(script);
    let mut process = world.command(interpreter);
    process
        .arg(script)
        .args(["--mode", mode, "--workspace"])
        .arg(world.workspace());
    process
        .arg("--socket")
        .arg(world.socket())
        .arg(command)
        .output()
        .unwrap()
}

fn behaves(interpreter: &str, script: &str) {
    for user in users() {
        let world = World::new(user);
        let path = world.outside().join("refused");
        let refused = format!(
            "printf 'out\\xff'; echo err >&2; touch {} 2>/dev/null; exit 3",
            path.display()
        );
        let output = run(&world, interpreter, script, "workspace-write", &refused);
        assert_eq!(output.stdout, b"out\xff", "{script} {user:?} {output:?}");
        let fact = format!("err\nrefused: create-file EACCES {}\n", path.display());
        assert_eq!(String::from_utf8_lossy(&output.stderr), fact, "{script}");
        assert_eq!(output.status.code(), Some(3), "{script}");
        let killed = run(&world, interpreter, script, "read-only", "kill -TERM $$");
        assert_eq!(killed.status.code(), Some(143), "{script}");
        let invalid = run(&world, interpreter, script, "read-only", " ");
        assert_eq!(
            (
                invalid.status.code(),
                String::from_utf8_lossy(&invalid.stderr).into_owned()
            ),
            (
                Some(1),
                "not run: invalid command: expected a non-empty string\n".into()
            ),
            "{script}"
        );
        let much = run(&world, interpreter, script, "read-only", "seq 200000");
        assert_eq!(much.stdout.len(), 1_288_895, "{script}");
    }
}

#[test]
fn the_client_in_python_runs_and_tells_refusals() {
    if can_run("the_client_in_python", Feature::Python) {
        behaves("python3", "client.py");
    }
}

#[test]
fn the_client_in_node_runs_and_tells_refusals() {
    if can_run("the_client_in_node", Feature::Node) {
        behaves("node", "client.mjs");
    }
}
