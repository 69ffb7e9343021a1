"""Who may use a server, and how much: tenants, their keys, and their quotas."""

from qiao.tenants.keys import KeyStore as KeyStore
from qiao.tenants.keys import NewKey as NewKey
from qiao.tenants.keys import StoredKey as StoredKey
from qiao.tenants.quota import Reservation as Reservation
from qiao.tenants.quota import TenantQuota as TenantQuota
from qiao.tenants.ring import KeyRing as KeyRing
from qiao.tenants.tenant import CLASSES as CLASSES
from qiao.tenants.tenant import DEFAULT_TENANT as DEFAULT_TENANT
from qiao.tenants.tenant import PriorityClass as PriorityClass
from qiao.tenants.tenant import Tenant as Tenant
from qiao.tenants.usage import DailyUsage as DailyUsage

__all__ = [
    "CLASSES",
    "DEFAULT_TENANT",
    "DailyUsage",
    "KeyRing",
    "KeyStore",
    "NewKey",
    "PriorityClass",
    "Reservation",
    "StoredKey",
    "Tenant",
    "TenantQuota",
]
