//! `dsh-exec config`: shows, locates and writes the daemon's configuration.
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use clap::{Subcommand, ValueEnum};

use super::print;
use crate::address::Endpoint;
use crate::error::ClientError;
use crate::start;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec config show                      every setting in force, with its meaning
  dsh-exec config path                      the file that is read
  dsh-exec config init --preset strict      write a commented file to start from
  dsh-exec config init --print | less       only look at one")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print every setting that is in force in the daemon
    Show,
    /// Print the file that a daemon reads, whether or not it exists
    Path,
    /// Write a commented file to start from
    Init(InitArgs),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec config init                            the defaults, each explained
  dsh-exec config init --preset strict --force    replace the file that is there

A daemon that runs already reads the file again on SIGHUP: kill -HUP $(dsh-exec status --json | jq .pid)")]
struct InitArgs {
    /// Which settings to begin with
    #[arg(long, value_enum, default_value_t = Preset::Compatible)]
    preset: Preset,
    /// Replace a file that is there already
    #[arg(long)]
    force: bool,
    /// Print the file instead of writing it
    #[arg(long, conflicts_with = "force")]
    print: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// The defaults: most programs run as they do outside
    Compatible,
    /// No network, no full access, credentials unreadable, a private /tmp
    Strict,
}

impl Preset {
    fn text(self) -> &'static str {
        match self {
            Self::Compatible => include_str!("../../templates/compatible.toml"),
            Self::Strict => include_str!("../../templates/strict.toml"),
        }
    }
}

/// Does what the subcommand says.
///
/// # Errors
/// When no daemon answers, or the file cannot be written.
pub(crate) fn run(args: &ConfigArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    match &args.action {
        Action::Show => {
            let (toml, _) = start::connect(endpoint)?.config()?;
            print::print(toml.as_bytes())?;
        }
        Action::Path => print_path(&path(endpoint)?)?,
        Action::Init(init) if init.print => {
            print::print(init.preset.text().as_bytes())?;
        }
        Action::Init(init) => {
            let file = usual_path()?;
            write(&file, init.preset.text(), init.force).map_err(|error| ClientError::Local(explain(&file, &error)))?;
            print_path(&file)?;
        }
    }
    Ok(0)
}

fn print_path(path: &Path) -> Result<(), ClientError> {
    let mut line = path.as_os_str().as_bytes().to_vec();
    line.push(b'\n');
    print::print(&line)
}

/// A named daemon may have been started with another file, so it is asked; the usual one need not run.
fn path(endpoint: &Endpoint) -> Result<PathBuf, ClientError> {
    match endpoint {
        Endpoint::Socket(_) => Ok(start::connect(endpoint)?.config()?.1.to_path_buf()),
        Endpoint::Default { .. } => usual_path(),
    }
}

fn usual_path() -> Result<PathBuf, ClientError> {
    config_folder().map(|folder| folder.join("dsh-execd/config.toml"))
}

/// The user's folder of configurations. A relative path in the environment is no path at all, as the XDG specification says.
pub(super) fn config_folder() -> Result<PathBuf, ClientError> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CONFIG_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".config")))
        .ok_or_else(|| ClientError::Local("neither XDG_CONFIG_HOME nor HOME names a folder".into()))
}

/// Writes a file as a whole or not at all: a daemon that starts meanwhile never reads half of it.
pub(super) fn write(file: &Path, text: &str, replace: bool) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // Somebody who keeps the file elsewhere behind a link goes on doing so.
    let file = if replace {
        file.canonicalize().unwrap_or_else(|_| file.to_owned())
    } else {
        file.to_owned()
    };
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let new = file.with_file_name(name);
    let written = create(&new, text).and_then(|()| {
        if replace {
            fs::rename(&new, &file)
        } else {
            // Unlike a rename, a link fails when the name is taken.
            fs::hard_link(&new, &file).and_then(|()| fs::remove_file(&new))
        }
    });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn create(file: &Path, text: &str) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

fn explain(file: &Path, error: &io::Error) -> String {
    let file = file.display();
    if error.kind() == io::ErrorKind::AlreadyExists {
        format!("{file} exists already; --force replaces it, --print shows what would be written")
    } else {
        format!("cannot write {file}: {error}")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_written_once_closed_to_others_and_nothing_else_stays() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("a/b/config.toml");
        write(&file, "one", false).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(temp.path().join("a")).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let error = write(&file, "two", false).unwrap_err();
        assert!(explain(&file, &error).contains("--force"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "one");
        write(&file, "two", true).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(names(file.parent().unwrap()), ["config.toml"]);
    }

    #[test]
    fn a_dangling_link_counts_as_a_file_and_a_link_is_kept_when_replacing() {
        let temp = tempfile::tempdir().unwrap();
        let (link, real) = (temp.path().join("config.toml"), temp.path().join("real.toml"));
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(
            write(&link, "x", false).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        fs::write(&real, "old").unwrap();
        write(&link, "new", true).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
    }
}
