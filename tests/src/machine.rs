//! What this machine can do, and what the one who runs the tests says it can do: a feature that was declared and is missing is a failure, never a skip.
//!
//! `DSH_TEST_EXPECT` is a list such as `landlock:7,userns,seccomp` (`landlock:7` means ABI 7 or later).
use std::process::Command;

use crate::binaries;

/// A feature of the kernel that some tests need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Landlock of at least this ABI.
    Landlock(u32),
    /// Unprivileged user namespaces.
    UserNamespaces,
    /// Seccomp with user notification.
    Seccomp,
    /// What developers use every day: git, a C compiler, make, tar, strace, script, flock.
    Tools,
    /// Python 3.
    Python,
    /// Node 18 or later.
    Node,
    /// The MCP project's Python client, at the interpreter that `DSH_MCP_PYTHON` names.
    McpPython,
}

impl std::str::FromStr for Feature {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("landlock", abi)) => abi
                .parse()
                .map(Self::Landlock)
                .map_err(|error| format!("{text}: {error}")),
            None if text == "userns" => Ok(Self::UserNamespaces),
            None if text == "seccomp" => Ok(Self::Seccomp),
            None if text == "tools" => Ok(Self::Tools),
            None if text == "python" => Ok(Self::Python),
            None if text == "node" => Ok(Self::Node),
            None if text == "mcp-python" => Ok(Self::McpPython),
            _ => Err(format!(
                "{text}: not one of landlock:ABI, userns, seccomp, tools, python, node, mcp-python"
            )),
        }
    }
}

/// What `DSH_TEST_EXPECT` declares.
#[must_use]
pub fn declared() -> Vec<Feature> {
    let list = std::env::var("DSH_TEST_EXPECT").unwrap_or_default();
    list.split(',')
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().expect("DSH_TEST_EXPECT"))
        .collect()
}

/// Whether the kernel has it, asked by the probe and not by the product.
#[must_use]
pub fn has(feature: Feature) -> bool {
    match feature {
        Feature::Landlock(abi) => {
            probe("landlock-abi")
                .strip_prefix("OK ")
                .and_then(|n| n.parse::<u32>().ok())
                >= Some(abi)
        }
        Feature::UserNamespaces => probe("unshare-user") == "OK",
        Feature::Seccomp => probe("seccomp-notify") == "OK",
        Feature::Tools => TOOLS.iter().all(|tool| is_on_path(tool)),
        Feature::Python => answers("python3", "import sys; assert sys.version_info[0] == 3"),
        Feature::Node => answers("node", "process.exit(parseInt(process.versions.node) >= 18 ? 0 : 1)"),
        Feature::McpPython => mcp_python().is_some(),
    }
}

/// Whether a test that needs `feature` can run here. Panics when the feature was declared but is not there; otherwise says why the test is left out.
#[must_use]
pub fn can_run(test: &str, feature: Feature) -> bool {
    let present = has(feature);
    assert!(
        present || !declared().contains(&feature),
        "{test}: {feature:?} was declared but this machine does not have it"
    );
    if !present {
        eprintln!("{test}: left out, this machine has no {feature:?}");
    }
    present
}

const TOOLS: [&str; 8] = ["git", "cc", "make", "tar", "strace", "script", "flock", "mktemp"];

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Whether an interpreter is there and runs `program` without an error.
fn answers(interpreter: &str, program: &str) -> bool {
    let flag = if interpreter == "node" { "-e" } else { "-c" };
    let ran = Command::new(interpreter).args([flag, program]).output();
    ran.is_ok_and(|output| output.status.success())
}

/// The interpreter that has the MCP project's client.
#[must_use]
pub fn mcp_python() -> Option<std::ffi::OsString> {
    let python = std::env::var_os("DSH_MCP_PYTHON")?;
    let has_it = Command::new(&python).args(["-c", "import mcp"]).output();
    has_it.is_ok_and(|output| output.status.success()).then_some(python)
}

fn probe(door: &str) -> String {
    let output = Command::new(binaries::directory().join("dsh-probe"))
        .arg(door)
        .output()
        .expect("the probe runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
