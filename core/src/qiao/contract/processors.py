"""For plugins that compute on the host: the processors that this process may use."""

from qiao.processors import Core, allowed_cpus, cores, cpu_quota, granted_cpus, nodes

__all__ = ["Core", "allowed_cpus", "cores", "cpu_quota", "granted_cpus", "nodes"]
