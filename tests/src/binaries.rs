//! Where the built binaries are, and building them when they are missing or stale.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Every program that a world needs, in one folder.
pub const NAMES: [&str; 4] = ["dsh-exec", "dsh-execd", "dsh-exec-helper", "dsh-probe"];

/// The repository.
#[must_use]
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests' crate is a folder of the repository")
        .to_owned()
}

/// The folder with up-to-date binaries of the same profile as the running test. Builds at most once per process.
///
/// `DSH_TEST_BIN_DIR` names a folder to use as it is, for tests of an installed package.
pub fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| match std::env::var_os("DSH_TEST_BIN_DIR") {
        Some(given) => PathBuf::from(given),
        None => build(),
    })
}

fn build() -> PathBuf {
    // …/<target folder>/<triple>/<profile>/deps/<this test>
    let test = std::env::current_exe().expect("the test knows its own file");
    let profile = test
        .ancestors()
        .nth(2)
        .expect("a test is two folders below its profile's");
    let target = profile
        .ancestors()
        .nth(2)
        .expect("a profile's folder is two below the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(repository())
        .args(["build", "--quiet", "--locked", "--workspace", "--bins", "--target-dir"])
        .arg(target);
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    // What cargo set for this test would make the nested build believe that everything changed.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG")
            || text.starts_with("CARGO_BIN")
            || text == "CARGO_MANIFEST_DIR"
            || text == "CARGO_CRATE_NAME"
        {
            cargo.env_remove(&name);
        }
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the binaries under test do not build");
    profile.to_owned()
}
