//! Tells systemd how the daemon is, in the protocol of `sd_notify`. Without systemd it does nothing.
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// What systemd can be told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    /// Requests are served.
    Ready,
    /// The configuration is being read again; `Ready` follows.
    Reloading,
    /// Requests are no longer served.
    Stopping,
}

/// Sends a notice. A failure is logged: it changes nothing for clients.
pub(crate) fn send(notice: Notice) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send_to(&address, &text(notice)) {
        tracing::warn!(%error, "systemd could not be told");
    }
}

fn text(notice: Notice) -> String {
    match notice {
        Notice::Ready => "READY=1".into(),
        Notice::Stopping => "STOPPING=1".into(),
        Notice::Reloading => {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
            format!("RELOADING=1\nMONOTONIC_USEC={micros}")
        }
    }
}

fn send_to(address: &OsStr, text: &str) -> io::Result<()> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?
        .send_to_addr(text.as_bytes(), &address)
        .map(|_| ())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_arrives_by_path_and_by_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("dsh-notify-test-{}", std::process::id());
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send_to(path.as_os_str(), &text(Notice::Ready)).unwrap();
        send_to(OsStr::new(&format!("@{name}")), &text(Notice::Stopping)).unwrap();
        let mut buffer = [0; 64];
        let count = by_path.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"READY=1");
        let count = by_name.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"STOPPING=1");
    }
}
