//! The one interface of a command's own network.
use std::ptr;

use libc::c_int;

/// Brings up the loopback interface of a new net namespace.
///
/// # Safety
/// Only in a child that was forked for this and is in a net namespace of its own.
pub(super) unsafe fn raise() -> c_int {
    // SAFETY: a zeroed ifreq is valid; the flags are the member of the union that both requests use.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return -1;
        }
        let mut request: libc::ifreq = std::mem::zeroed();
        ptr::copy_nonoverlapping(c"lo".as_ptr(), request.ifr_name.as_mut_ptr(), 2);
        if libc::ioctl(socket, libc::SIOCGIFFLAGS, &raw mut request) == -1 {
            return -1;
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        let raised = libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request);
        libc::close(socket);
        raised
    }
}
