"""The operator: turns one MammothDeployment into two GPU pools, keeps them healthy and rolls them as a pair."""
