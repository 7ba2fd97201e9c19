//! The configurations to start from: `compatible` is what a daemon does without a file, `strict` holds.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::fs;

use dsh_policy::SandboxMode;
use dsh_tests::{World, users};

/// What the daemon makes of a file, with every key.
fn read_by_the_daemon(world: &World) -> String {
    let check = world
        .command(world.binary("dsh-execd"))
        .arg("--check-config")
        .output()
        .unwrap();
    assert!(check.status.success(), "{check:?}");
    String::from_utf8(check.stdout).unwrap()
}

fn preset(world: &World, name: &str) -> String {
    let arguments = ["config", "init", "--print", "--preset", name].map(OsStr::new);
    let output = world.dsh_exec(&arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// `name` of `name = value` and of `# name = value`.
fn key(line: &str) -> Option<&str> {
    let (key, _) = line.strip_prefix("# ").unwrap_or(line).split_once(" = ")?;
    key.chars().all(|c| c.is_ascii_alphanumeric()).then_some(key)
}

#[test]
fn compatible_changes_nothing_and_shows_every_key_with_its_default() {
    let world = World::without_daemon(users()[0], "");
    let defaults = read_by_the_daemon(&world);
    let compatible = preset(&world, "compatible");
    world.write(&world.config_file(), compatible.as_bytes());
    assert_eq!(read_by_the_daemon(&world), defaults);
    let keys = |text: &str| {
        let mut keys: Vec<String> = text.lines().filter_map(key).map(str::to_owned).collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&compatible), keys(&defaults));
    // What is commented out is the default as well.
    let has_default = |name: &str| defaults.lines().any(|line| line.starts_with(&format!("{name} = ")));
    let uncommented: Vec<&str> = compatible
        .lines()
        .map(|line| match key(line) {
            Some(name) if has_default(name) => line.strip_prefix("# ").unwrap_or(line),
            _ => line,
        })
        .collect();
    world.write(&world.config_file(), uncommented.join("\n").as_bytes());
    assert_eq!(read_by_the_daemon(&world), defaults);
}

#[test]
fn strict_closes_network_credentials_and_the_way_out_and_work_goes_on() {
    for user in users() {
        let mut world = World::without_daemon(user, "");
        let strict = preset(&world, "strict");
        world.write(&world.config_file(), strict.as_bytes());
        let secret = world.home().join(".netrc");
        world.write(&secret, b"machine x");
        world.start_daemon();
        let script = format!(
            "echo in > a && cat a; touch {}/x; cat ~/.netrc; exec 3<>/dev/tcp/127.0.0.1/9",
            world.outside().display()
        );
        let result = world.run(SandboxMode::DangerFullAccess, &script).result();
        assert_eq!(result.stdout.text, "in\n");
        assert_eq!(result.sandbox.mode, SandboxMode::WorkspaceWrite);
        let confined = result.sandbox.confined.unwrap();
        assert_eq!(confined.requested_mode, Some(SandboxMode::DangerFullAccess));
        let rules: Vec<&str> = confined.denials.iter().map(|fact| fact.rule.as_str()).collect();
        assert_eq!(
            rules,
            ["outside-writable-roots", "deny-read", "network-none"],
            "{:?}",
            confined.denials
        );
        assert!(!world.outside().join("x").exists());
        assert_eq!(fs::read(world.workspace().join("a")).unwrap(), b"in\n");
    }
}
