//! Where the daemon's socket and its log are for this user.
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::error::ClientError;

/// How to reach a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The usual socket of this user; a daemon is started when none answers, if `autostart`.
    Default {
        /// Whether a daemon may be started.
        autostart: bool,
    },
    /// This socket and no other; never starts anything.
    Socket(PathBuf),
}

fn absolute(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
}

/// The folder that holds the usual socket: below `XDG_RUNTIME_DIR`, else one of this user's own in `/tmp`.
#[must_use]
pub fn runtime_folder() -> PathBuf {
    absolute("XDG_RUNTIME_DIR").map_or_else(
        || PathBuf::from(format!("/tmp/dsh-execd-{}", rustix::process::geteuid().as_raw())),
        |folder| folder.join("dsh-execd"),
    )
}

/// The folder of spill files and the log: below `XDG_STATE_HOME`, else `~/.local/state`, else the runtime folder.
#[must_use]
pub fn state_folder() -> PathBuf {
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map_or_else(|| runtime_folder().join("state"), |folder| folder.join("dsh-execd"))
}

/// The usual socket.
#[must_use]
pub fn default_socket() -> PathBuf {
    runtime_folder().join("socket")
}

/// Refuses a folder that somebody else could have put in the way of the socket; one that is missing is fine.
///
/// # Errors
/// [`ClientError::Unreachable`] says what is wrong with it.
pub fn check_folder(folder: &Path) -> Result<(), ClientError> {
    let Ok(metadata) = fs::symlink_metadata(folder) else {
        return Ok(());
    };
    let own = rustix::process::geteuid().as_raw();
    let mode = metadata.mode() & 0o777;
    let problem = if !metadata.is_dir() {
        "is not a folder of its own (a link is refused)".to_owned()
    } else if metadata.uid() != own {
        format!("belongs to user {}, not to user {own}", metadata.uid())
    } else if mode & 0o077 != 0 {
        format!("has mode {mode:04o} but must be closed to others (chmod 700)")
    } else {
        return Ok(());
    };
    Err(ClientError::Unreachable(format!(
        "refusing to use the socket in {}: it {problem}",
        folder.display()
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_folder_open_to_others_or_a_link_is_refused_and_a_missing_one_is_not() {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("run");
        check_folder(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(check_folder(&folder).unwrap_err().to_string().contains("mode 0755"));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        check_folder(&folder).unwrap();
        std::os::unix::fs::symlink(&folder, temp.path().join("link")).unwrap();
        assert!(
            check_folder(&temp.path().join("link"))
                .unwrap_err()
                .to_string()
                .contains("link")
        );
    }
}
