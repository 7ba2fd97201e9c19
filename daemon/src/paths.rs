//! Where the daemon's folders are, and that they belong to this user alone.
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// A folder that cannot be trusted or made.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    /// It cannot be made or looked at.
    #[error("cannot use the folder {path}: {source}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is a link or no folder.
    #[error("{path} is not a folder of its own (a link is refused); remove it or name another one", path = .0.display())]
    NotAFolder(PathBuf),
    /// It belongs to somebody else.
    #[error("{path} belongs to user {owner}, not to user {own}; refusing to use it", path = path.display())]
    ForeignOwner {
        /// Which.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who we are.
        own: u32,
    },
    /// Others can look or write into it.
    #[error("{path} has mode {mode:04o} but must be closed to others; run `chmod 700 {path}`", path = path.display())]
    OpenToOthers {
        /// Which.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// The user's surroundings, read from the environment once.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The home folder; none when `HOME` is absent or relative.
    pub home: Option<PathBuf>,
    /// Where the socket and the lock are.
    pub runtime: PathBuf,
    /// Where spill files and records are.
    pub state: PathBuf,
    /// The configuration file, whether or not it exists; none without any home.
    pub config: Option<PathBuf>,
}

impl Surroundings {
    /// From a lookup of environment variables (the process's own in production). Relative values count as absent, as XDG says.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<std::ffi::OsString>) -> Self {
        let absolute = |name: &str| lookup(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let home = absolute("HOME");
        let below_home = |rest: &str| home.as_ref().map(|home| home.join(rest));
        let runtime = absolute("XDG_RUNTIME_DIR").map_or_else(
            || PathBuf::from(format!("/tmp/dsh-execd-{}", geteuid().as_raw())),
            |dir| dir.join("dsh-execd"),
        );
        let state = absolute("XDG_STATE_HOME").or_else(|| below_home(".local/state"));
        let state = state.map_or_else(|| runtime.join("state"), |dir| dir.join("dsh-execd"));
        let config = absolute("XDG_CONFIG_HOME").or_else(|| below_home(".config"));
        let config = config.map(|dir| dir.join("dsh-execd/config.toml"));
        Self {
            home,
            runtime,
            state,
            config,
        }
    }
}

/// Makes a folder (and what is above it) with mode 0700 if it is missing, and checks that it is this user's alone.
///
/// # Errors
/// [`PathError`] says what is wrong and what to do.
pub fn private_folder(path: &Path) -> Result<(), PathError> {
    let failed = |source| PathError::Io {
        path: path.to_owned(),
        source,
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed)?;
    let metadata = fs::symlink_metadata(path).map_err(failed)?;
    if !metadata.is_dir() {
        return Err(PathError::NotAFolder(path.to_owned()));
    }
    let own = geteuid().as_raw();
    if metadata.uid() != own {
        return Err(PathError::ForeignOwner {
            path: path.to_owned(),
            owner: metadata.uid(),
            own,
        });
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(PathError::OpenToOthers {
            path: path.to_owned(),
            mode: metadata.mode() & 0o7777,
        });
    }
    Ok(())
}

/// Sixteen hexadecimal digits that nobody can guess.
pub(crate) fn random_name() -> io::Result<String> {
    let mut bytes = [0; 8];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if count == bytes.len() {
        Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn surroundings(pairs: &[(&str, &str)]) -> Surroundings {
        Surroundings::from_lookup(|name| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| std::ffi::OsString::from(value))
        })
    }

    #[test]
    fn each_folder_falls_back_as_documented() {
        let all = surroundings(&[
            ("HOME", "/h"),
            ("XDG_RUNTIME_DIR", "/r"),
            ("XDG_STATE_HOME", "/s"),
            ("XDG_CONFIG_HOME", "/c"),
        ]);
        assert_eq!(all.runtime, Path::new("/r/dsh-execd"));
        assert_eq!(all.state, Path::new("/s/dsh-execd"));
        assert_eq!(all.config.unwrap(), Path::new("/c/dsh-execd/config.toml"));
        let home = surroundings(&[("HOME", "/h"), ("XDG_STATE_HOME", "relative")]);
        assert_eq!(home.state, Path::new("/h/.local/state/dsh-execd"));
        assert_eq!(home.config.unwrap(), Path::new("/h/.config/dsh-execd/config.toml"));
        let none = surroundings(&[]);
        assert_eq!(
            none.runtime,
            PathBuf::from(format!("/tmp/dsh-execd-{}", geteuid().as_raw()))
        );
        assert_eq!(none.state, none.runtime.join("state"));
        assert!(none.config.is_none());
    }

    #[test]
    fn a_folder_is_made_private_and_an_open_or_linked_one_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let made = base.path().join("a/b");
        private_folder(&made).unwrap();
        assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o7777, 0o700);
        fs::set_permissions(&made, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(matches!(
            private_folder(&made),
            Err(PathError::OpenToOthers { mode: 0o750, .. })
        ));
        let link = base.path().join("link");
        symlink(base.path().join("a"), &link).unwrap();
        assert!(matches!(private_folder(&link), Err(PathError::NotAFolder(_))));
    }

    #[test]
    fn random_names_differ() {
        let (first, second) = (random_name().unwrap(), random_name().unwrap());
        assert_eq!(first.len(), 16);
        assert_ne!(first, second);
    }
}
